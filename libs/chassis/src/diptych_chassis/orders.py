"""Orders given and obeyed: signed here, verified here, and nowhere else.

What counts as an order, from whom and for how long, is `policy.orders`. A process without an
identity (on a memory bus) gives its orders unsigned, and obeys such ones; all else holds there too.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from diptych_chassis.member import Member
from diptych_contracts.errors import Permanent
from diptych_contracts.ids import Incarnation
from diptych_contracts.orders import Order, Signed
from diptych_contracts.wire import Message, decode, encode
from diptych_identity.identity import Identity
from diptych_identity.roles import Role
from diptych_policy.orders import Obedience, Refusal
from diptych_telemetry import logger, metrics

MAX_TOLD = 64
"""Different refusals that are told; each once, further ones are only counted."""

_SHOWN = 80

log = logger(__name__)


class Believing(Protocol):
    """What verifies a signature: `diptych_identity.trust.Trust`."""

    def verify(self, name: str, role: Role, jwt: str, signature: bytes, data: bytes) -> None:
        """Believe that process `name`, which is a `role`, signed `data`. Raises `Permanent`."""
        ...


class Refused(Permanent):
    """An order that is not obeyed."""

    def __init__(self, refusal: Refusal, detail: str) -> None:
        super().__init__(f"this order is not obeyed ({refusal}): {detail}")
        self.refusal = refusal


class Orders:
    """Gives the orders of one process.

    Args:
        sender: Who it is.
        role: What it is.
        unix_ms: The bus's clock.
        identity: Signs; asked at each order, since identities are renewed. None: nobody verifies.
    """

    def __init__(
        self,
        sender: Incarnation,
        role: str,
        *,
        unix_ms: Callable[[], int],
        identity: Callable[[], Identity] | None,
    ) -> None:
        self._sender = sender
        self._role = role
        self._unix_ms = unix_ms
        self._identity = identity
        self._sequence = 0

    def signed(self, subject: str, body: Message, *, epoch: int, valid_ms: int) -> Signed:
        """`body` as an order to whoever listens on `subject`, for `valid_ms` from now."""
        self._sequence += 1
        now_unix_ms = self._unix_ms()
        order = Order(
            subject=subject,
            sender=self._sender,
            role=self._role,
            epoch=epoch,
            sequence=self._sequence,
            issued_unix_ms=now_unix_ms,
            expires_unix_ms=now_unix_ms + valid_ms,
            body=encode(body),
        )
        content = encode(order)
        if self._identity is None:
            return Signed(content=content)
        identity = self._identity()
        return Signed(content=content, credential=identity.jwt, signature=identity.sign(content))


def orders_of(member: Member) -> Orders:
    """The orders that `member` gives."""
    access = member.access
    identity = None if access is None else lambda: access.identity
    return Orders(member.incarnation, member.service, unix_ms=member.bus.unix_ms, identity=identity)


class Obeying:
    """Hears the orders of one subject.

    Args:
        subject: Where they come.
        kinds: The types of what may be ordered there.
        unix_ms: The bus's clock.
        trust: Verifies who speaks; None: on a bus where nobody has an identity.
    """

    def __init__(
        self,
        subject: str,
        *kinds: type[Message],
        unix_ms: Callable[[], int],
        trust: Believing | None,
    ) -> None:
        self._obedience = Obedience(subject)
        self._kinds = {str(kind.__struct_config__.tag): kind for kind in kinds}
        self._unix_ms = unix_ms
        self._trust = trust
        self._told: set[tuple[str, Refusal]] = set()

    def order(self, data: bytes) -> Any:
        """What is ordered: a message of one of the kinds.

        Raises:
            Refused: it is not to be obeyed; counted, and told once per sender and reason.
        """
        sender = ""
        try:
            content, signed = self._opened(data)
            order = _order(content)
            sender = order.sender
            self._verify(order, signed)
            return self._body(order)
        except Refused as err:
            self._tell(sender, err)
            raise

    def heard(self, data: bytes) -> Any | None:
        """`order`, where nobody waits for an answer: None if it is refused."""
        try:
            return self.order(data)
        except Refused:
            return None

    def _opened(self, data: bytes) -> tuple[bytes, Signed]:
        try:
            signed: Signed = decode(data, Signed)
        except Permanent as err:
            bare = _tag(data) in self._kinds
            refusal = Refusal.UNSIGNED if bare else Refusal.UNREADABLE
            raise Refused(refusal, str(err)) from err
        return signed.content, signed

    def _verify(self, order: Order, signed: Signed) -> None:
        if self._trust is None:
            return
        if not signed.signature:
            raise Refused(Refusal.UNSIGNED, f"{order.sender} did not sign it")
        try:
            role = Role(order.role)
            self._trust.verify(
                order.sender, role, signed.credential, signed.signature, signed.content
            )
        except (Permanent, ValueError) as err:
            raise Refused(Refusal.FORGED, str(err)) from err

    def _body(self, order: Order) -> Message:
        kind = self._kinds.get(_tag(order.body))
        if kind is None:
            raise Refused(Refusal.UNREADABLE, f"{order.sender} orders what nobody does here")
        try:
            body: Message = decode(order.body, kind)
        except Permanent as err:
            raise Refused(Refusal.UNREADABLE, str(err)) from err
        refusal = self._obedience.judge(order, kind, unix_ms=self._unix_ms())
        if refusal is not None:
            raise Refused(refusal, f"{_name(kind)} of {order.sender}, which is a {order.role}")
        return body

    def _tell(self, sender: str, err: Refused) -> None:
        metrics.process().orders_refused.labels(err.refusal).inc()
        sender = sender[:_SHOWN]  # whoever forges may say megabytes
        told = (sender, err.refusal)
        if told not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(told)
            error = str(err)[: 4 * _SHOWN]
            log.warning("order_refused", sender=sender, reason=err.refusal, error=error)


def obeying(member: Member, subject: str, *kinds: type[Message]) -> Obeying:
    """What `member` obeys on `subject`."""
    access = member.access
    trust = None if access is None else access.trust
    return Obeying(subject, *kinds, unix_ms=member.bus.unix_ms, trust=trust)


def _order(content: bytes) -> Order:
    try:
        order: Order = decode(content, Order)
    except Permanent as err:
        raise Refused(Refusal.UNREADABLE, str(err)) from err
    return order


def _tag(data: bytes) -> str:
    """The type that `data` says it is of; empty if it says none."""
    try:
        said = msgspec.msgpack.decode(data, type=_Tagged)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ""
    return said.type


class _Tagged(msgspec.Struct):
    type: str = ""


def _name(kind: type[Message]) -> str:
    return str(kind.__struct_config__.tag).partition(".")[0]
