"""Whether a writer's KV is of the kind a reader can use, and an answer is one to the question."""

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.codecs import RAW
from diptych_contracts.errors import Incompatible
from diptych_contracts.transfers import Reserve, Ticket
from diptych_kvlink.block_seal import KEY_BYTES


def check_layout(ours: KvLayout, theirs: KvLayout) -> None:
    """Raise `Incompatible`, naming every field that differs.

    Where no block passes through slots it is the engines that bring their layouts together.
    """
    if ours.slot_bytes or theirs.slot_bytes:
        _check("KV layout", ours, theirs)


def check_fingerprint(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Raise `Incompatible`, naming every field that differs."""
    _check("model fingerprint", ours, theirs)


def check_ticket(ticket: Ticket, request: Reserve, *, tokens: int) -> None:
    """Raise `Incompatible` unless it answers `request` for `tokens` tokens.

    Its numbers become memory of the writer's, so none of them is taken on trust.
    """
    check_layout(request.layout, ticket.layout)
    endpoint, blocks = ticket.endpoint, request.layout.blocks(tokens)
    if ticket.held_blocks:
        if not 0 < ticket.held_blocks < blocks or not request.leaves_out:
            raise Incompatible(
                f"{ticket.transfer_id}: expected at most {blocks - 1 if request.leaves_out else 0} "
                f"blocks to be left out, got {ticket.held_blocks}"
            )
        blocks -= ticket.held_blocks
    asked = (request.transfer_id, request.generation.attempt, request.link, blocks)
    given = (ticket.transfer_id, ticket.attempt, endpoint.kind, len(ticket.slots))
    if asked != given or ticket.seal is None:
        raise Incompatible(f"expected a sealed ticket of {asked}, got one of {given}")
    if endpoint.slot_bytes != request.layout.slot_bytes:
        raise Incompatible(
            f"{ticket.transfer_id}: expected slots of {request.layout.slot_bytes} bytes, "
            f"got {endpoint.slot_bytes}"
        )
    if ticket.codec not in (request.codec, RAW) or len(ticket.sealing_key) not in (0, KEY_BYTES):
        raise Incompatible(
            f"{ticket.transfer_id}: expected codec {request.codec} or {RAW} and a key of "
            f"{KEY_BYTES} bytes or none, got {ticket.codec} and {len(ticket.sealing_key)} bytes"
        )
    if any(not 0 <= ref.slot < endpoint.slots for ref in ticket.slots):
        raise Incompatible(f"{ticket.transfer_id}: a slot that none of {endpoint.slots} is")


def _check(what: str, ours: KvLayout | Fingerprint, theirs: KvLayout | Fingerprint) -> None:
    differing = [
        f"{name} (expected {getattr(ours, name)!r}, got {getattr(theirs, name)!r})"
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        raise Incompatible(f"{what} differs in {', '.join(differing)}")
