"""Who orders what, with real identities: `policy.orders` says the rest."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from diptych_chassis import orders
from diptych_chassis.orders import Obeying, Orders
from diptych_contracts.control import Scale
from diptych_contracts.ids import Incarnation
from diptych_contracts.orders import Order, Signed
from diptych_contracts.power import PowerSetPoint
from diptych_contracts.wire import decode, encode
from diptych_identity.authority import Authority
from diptych_identity.claims import Permissions
from diptych_identity.identity import Identity
from diptych_identity.roles import Role
from diptych_identity.trust import Trust
from diptych_policy.orders import Refusal
from diptych_telemetry import metrics

ME = Incarnation("decode-worker-1")
SUBJECT = f"power.{ME}"
GOVERNOR = Incarnation("power-governor-1")
NOW_MS = 1_700_000_000_000
POINT = PowerSetPoint(governor=GOVERNOR, worker=ME, sequence=1, cap_w=300.0, lease_ms=10_000)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    nothing = Permissions((), ())
    return Authority.make(tmp_path_factory.mktemp("stack") / "certs", dict.fromkeys(Role, nothing))


class Room:
    """A worker that obeys, and what others send it."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self.obeying = Obeying(
            SUBJECT, PowerSetPoint, unix_ms=lambda: NOW_MS, trust=Trust(authority.trust)
        )

    def identity(self, role: Role, name: str, **terms: Any) -> Identity:
        return self.authority.issuer(role).issue(name, **terms)

    def orders(self, identity: Identity | None, *, name: str = "", role: str = "") -> Orders:
        """Of whoever says that he is `name`, a `role`, and signs with `identity`."""
        sign = None if identity is None else lambda: identity
        return Orders(
            Incarnation(name or GOVERNOR),
            role or Role.POWER_GOVERNOR.value,
            unix_ms=lambda: NOW_MS,
            identity=sign,
        )

    def governor(self) -> Orders:
        return self.orders(self.identity(Role.POWER_GOVERNOR, GOVERNOR))

    def refusal(self, data: bytes) -> Refusal:
        with pytest.raises(orders.Refused) as refused:
            self.obeying.order(data)
        return refused.value.refusal


@pytest.fixture
def room(authority: Authority) -> Room:
    return Room(authority)


def said(by: Orders, *, subject: str = SUBJECT, epoch: int = 5, body: Any = POINT) -> Signed:
    return by.signed(subject, body, epoch=epoch, valid_ms=10_000)


def test_a_governors_order_is_obeyed(room: Room) -> None:
    by = room.governor()
    assert room.obeying.order(encode(said(by))) == POINT
    assert room.obeying.heard(encode(said(by))) == POINT


def test_a_command_without_a_signature_is_refused(room: Room) -> None:
    assert room.refusal(encode(POINT)) is Refusal.UNSIGNED
    assert room.refusal(encode(said(room.orders(None)))) is Refusal.UNSIGNED
    assert room.refusal(b"meow") is Refusal.UNREADABLE


def test_a_forged_command_is_refused(room: Room) -> None:
    """A worker's stolen credential, in the name of a governor, or of a governor's role."""
    thief = room.identity(Role.DECODE_WORKER, "decode-worker-9")
    assert room.refusal(encode(said(room.orders(thief)))) is Refusal.FORGED
    named = room.orders(thief, name="decode-worker-9")
    assert room.refusal(encode(said(named))) is Refusal.FORGED
    genuine = said(room.governor())
    own = msgspec.structs.replace(genuine, signature=thief.sign(genuine.content))
    assert room.refusal(encode(own)) is Refusal.FORGED


def test_an_altered_command_is_refused(room: Room) -> None:
    genuine = said(room.governor())
    order: Order = decode(genuine.content, Order)
    louder = msgspec.structs.replace(POINT, cap_w=700.0)
    for changed in ({"body": encode(louder)}, {"epoch": 6}, {"expires_unix_ms": NOW_MS + 50_000}):
        content = encode(msgspec.structs.replace(order, **changed))
        altered = msgspec.structs.replace(genuine, content=content)
        assert room.refusal(encode(altered)) is Refusal.FORGED
    assert room.obeying.order(encode(genuine)) == POINT


def test_a_replayed_command_is_refused(room: Room) -> None:
    data = encode(said(room.governor()))
    assert room.obeying.order(data) == POINT
    assert room.refusal(data) is Refusal.REPLAYED


def test_a_command_for_another_worker_is_refused(room: Room) -> None:
    other = said(room.governor(), subject="power.decode-worker-2")
    assert room.refusal(encode(other)) is Refusal.FOREIGN


def test_a_governor_of_an_older_epoch_is_refused(room: Room) -> None:
    first = room.governor()
    second = room.orders(
        room.identity(Role.POWER_GOVERNOR, "power-governor-2"), name="power-governor-2"
    )
    assert room.obeying.order(encode(said(first))) == POINT
    assert room.obeying.order(encode(said(second, epoch=8))) == POINT
    assert room.refusal(encode(said(first))) is Refusal.OLD_EPOCH


@pytest.mark.parametrize("role", [Role.DECODE_WORKER, Role.SCHEDULER, Role.OPERATOR])
def test_a_wrong_role_is_refused_though_it_signs_as_itself(room: Room, role: Role) -> None:
    name = f"{role.value}-7"
    by = room.orders(room.identity(role, name), name=name, role=role.value)
    assert room.refusal(encode(said(by))) is Refusal.FORBIDDEN


def test_an_order_of_another_kind_is_none_here(room: Room) -> None:
    scale = Scale(service="decode-worker", count=9)
    assert room.refusal(encode(said(room.governor(), body=scale))) is Refusal.UNREADABLE


def test_who_may_not_speak_any_more_is_refused(room: Room, tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "certs", dict.fromkeys(Role, Permissions((), ())))
    other = Room(authority)
    gone = authority.issuer(Role.POWER_GOVERNOR).issue(GOVERNOR)
    by = other.orders(gone)
    assert other.obeying.order(encode(said(by))) == POINT
    authority.revoke_identity(gone)
    assert other.refusal(encode(said(by))) is Refusal.FORGED
    assert room.refusal(encode(said(by))) is Refusal.FORGED  # another stack's


def test_a_flood_of_refusals_is_a_line_and_a_number(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def note(event: str, **facts: Any) -> None:
        told.append({"event": event, **facts})

    monkeypatch.setattr(orders.log, "warning", note)
    counter = metrics.process().orders_refused.labels(Refusal.UNSIGNED)
    before = counter._value.get()
    for _ in range(50):
        assert room.obeying.heard(encode(POINT)) is None
    assert counter._value.get() == before + 50
    assert [fact["reason"] for fact in told] == [Refusal.UNSIGNED]


def test_renewed_identities_sign(room: Room) -> None:
    """A process is not started again for it."""
    first = room.identity(Role.POWER_GOVERNOR, GOVERNOR)
    current = [first]
    by = Orders(
        GOVERNOR, Role.POWER_GOVERNOR.value, unix_ms=lambda: NOW_MS, identity=lambda: current[0]
    )
    assert room.obeying.order(encode(said(by))) == POINT
    current[0] = room.authority.issuer(Role.POWER_GOVERNOR).renew(first)
    assert room.obeying.order(encode(said(by))) == POINT


def test_bent_orders_are_refused_and_nothing_else_happens(room: Room) -> None:
    """What anybody may send: cut, flipped and grown at random, by a fixed seed."""
    rng = Random(7)
    signed = said(room.governor())
    order: Order = decode(signed.content, Order)
    for _ in range(400):
        inner = msgspec.structs.replace(
            order, epoch=rng.getrandbits(63), sender=Incarnation("g" * 99)
        )
        content = bent(rng, encode(inner))
        outer = msgspec.structs.replace(signed, content=content, signature=bent(rng, b"s" * 64))
        for data in (bent(rng, encode(outer)), encode(outer)):
            assert room.refusal(data) in Refusal
    assert room.obeying.order(encode(signed)) == POINT


def bent(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(0, 4)):
        changed[rng.randrange(len(changed))] = rng.getrandbits(8)
    return bytes(changed[: rng.randint(1, len(changed))]) + rng.randbytes(rng.randint(0, 3))
