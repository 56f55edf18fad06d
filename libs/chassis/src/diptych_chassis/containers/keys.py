"""Makes a stack's keys once, and lays out for each container what it may have, and no more.

    python -m diptych_chassis.containers.keys FOLDER HOST...

`FOLDER/authority` holds everything, `FOLDER/<role>` what a container of the role gets: its signing
key and what to trust; `nats` the server's certificate and what it believes; `operator` an identity.
Each is a volume of its own. Run again it renews what runs out, and keeps the keys.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from diptych_bus.permissions.granting import table
from diptych_identity import files
from diptych_identity.authority import LOOPBACK, OPERATOR_CREDS, SERVER_CONF, TRUST, Authority
from diptych_identity.roles import Role

KEY = "role.key"


def main(folder: Path, hosts: Sequence[str]) -> None:
    """Make and lay out; the server is reached at `hosts`."""
    made = Authority.opened(folder / "authority", table(), hosts=(*LOOPBACK, *hosts))
    made.issue_operator()
    for role in Role:
        if role is Role.OPERATOR:
            _lay(made.operator, folder / role.value / OPERATOR_CREDS)
        else:
            _lay(made.path / "roles" / f"{role.value}.key", folder / role.value / KEY)
        _lay(made.trust, folder / role.value / TRUST, mode=files.PUBLIC)
    for name in ("server.pem", SERVER_CONF):
        _lay(made.path / name, folder / "nats" / name)


def _lay(source: Path, to: Path, *, mode: int = files.PRIVATE) -> None:
    to.parent.mkdir(exist_ok=True)
    files.write(to, source.read_text(), mode=mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
