"""Gives the service in this container an identity, and runs it as a user who cannot make another.

    python -m diptych_chassis.containers.enter SERVICE COMMAND...

As root it reads the role's signing key and issues; the identity is written, and the service runs,
as an unprivileged user. It stays to renew the identity, hands signals on, and ends as the service.
It needs the capabilities SETUID, SETGID and KILL, and no other.
"""

import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from diptych_chassis.containers.keys import KEY
from diptych_chassis.settings import prefix
from diptych_identity import files
from diptych_identity.authority import TRUST
from diptych_identity.identity import Identity
from diptych_identity.issuing import TTL_S, Issuer

KEYS = Path("/run/keys")
SHOWN = Path("/tmp/identity.creds")
USER_ID = 10001
"""Of the images (`infra/docker/service.Dockerfile`)."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(service: str, command: Sequence[str]) -> int:
    """Run `command` as `service`; gives its exit code."""
    issuer = Issuer.of_text((KEYS / KEY).read_text())
    identity = issuer.issue(f"{service}-{secrets.token_hex(6)}")
    _apart(partial(files.write, SHOWN, identity.text()))
    environment = {
        **os.environ,
        "DIPTYCH_ALL__TRUST": str(KEYS / TRUST),
        f"{prefix(service)}IDENTITY": str(SHOWN),
        "HOME": "/nonexistent",
    }
    child = os.fork()
    if child == 0:
        _drop()
        os.execvpe(command[0], list(command), environment)
    for number in _SIGNALS:
        signal.signal(number, lambda told, _: os.kill(child, told))
    threading.Thread(target=_renew, args=(issuer, identity), daemon=True).start()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _renew(issuer: Issuer, identity: Identity) -> None:
    while True:
        threading.Event().wait(TTL_S / 4)
        _apart(partial(files.write, SHOWN, issuer.renew(identity).text()))


def _apart(work: Callable[[], None]) -> None:
    """Do `work` as the unprivileged user, in a process of its own."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _drop()
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"the identity cannot be written to {SHOWN}")


def _drop() -> None:
    os.setgroups([])
    os.setgid(USER_ID)
    os.setuid(USER_ID)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(128 - code if code < 0 else code)
