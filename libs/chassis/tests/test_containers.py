import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diptych_chassis.containers import keys
from diptych_identity import identity
from diptych_identity.issuing import Issuer
from diptych_identity.roles import Role
from diptych_identity.trust import Trust

ENTER = """
import sys
from pathlib import Path
from diptych_chassis.containers import enter
enter.KEYS, enter.SHOWN = Path(sys.argv[1]), Path(sys.argv[2])
sys.exit(enter.main("gateway", sys.argv[3:]))
"""


def test_each_share_holds_its_role_s_key_and_no_other(tmp_path: Path) -> None:
    keys.main(tmp_path, ["nats"])
    for role in Role:
        trust = Trust(tmp_path / role.value / "trust.pem")
        if role is Role.OPERATOR:
            me = identity.read(tmp_path / "operator" / "operator.creds")
        else:
            me = Issuer.of_text((tmp_path / role.value / "role.key").read_text()).issue("me")
        trust.verify(me.name, role, me.jwt, me.sign(b"x"), b"x")
        assert len(list((tmp_path / role.value).iterdir())) == 2
    assert {path.name for path in (tmp_path / "nats").iterdir()} == {"server.pem", "server.conf"}


def test_again_it_keeps_the_keys(tmp_path: Path) -> None:
    keys.main(tmp_path, ["nats"])
    before = (tmp_path / "gateway/role.key").read_text()
    keys.main(tmp_path, ["nats"])
    assert (tmp_path / "gateway/role.key").read_text() == before


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that anybody may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_service_has_its_identity_and_cannot_read_the_key(tmp_path: Path, shared: Path) -> None:
    keys.main(tmp_path, ["nats"])
    shown = shared / "me.creds"
    told = f"id -u; cat {tmp_path}/gateway/role.key; cat $DIPTYCH_GATEWAY__IDENTITY; exit 7"
    command = [sys.executable, "-c", ENTER, str(tmp_path / "gateway"), str(shown), "sh", "-c", told]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7
    user, _, shows = done.stdout.partition("\n")
    assert user == "10001"
    assert "Permission denied" in done.stderr
    assert identity.parse(shows).name.startswith("gateway-")
    assert (shown.stat().st_uid, shown.stat().st_mode & 0o777) == (10001, 0o600)
