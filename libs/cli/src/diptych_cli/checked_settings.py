"""Whether services would take their settings: asked before any of them is started."""

from collections.abc import Mapping

from diptych_chassis.settings import BadSettings, ServiceSettings, parse_settings
from diptych_cli.failing import CliError
from diptych_decode_worker.settings import DecodeWorkerSettings
from diptych_gateway.settings import GatewaySettings
from diptych_power_governor.settings import GovernorSettings
from diptych_prefill_worker.settings import PrefillWorkerSettings
from diptych_scheduler.settings import SchedulerSettings

_SETTINGS: Mapping[str, type[ServiceSettings]] = {
    "prefill-worker": PrefillWorkerSettings,
    "decode-worker": DecodeWorkerSettings,
    "scheduler": SchedulerSettings,
    "power-governor": GovernorSettings,
    "gateway": GatewaySettings,
}


def require_right(environ: Mapping[str, str]) -> None:
    """Make sure that no service would refuse what `environ` says.

    Raises:
        CliError: a variable is unknown or malformed.
    """
    for service, settings in _SETTINGS.items():
        try:
            parse_settings(settings, service, environ)
        except BadSettings as err:
            raise CliError(f"{service}: {err}") from err
