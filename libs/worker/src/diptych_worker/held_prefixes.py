"""What the engine here has of KV that is to be handed over: it need not cross again.

    reserve   the cached beginning of its context is pinned, the ticket says how many blocks it is
    import    the engine forks it and imports what follows
    end       whatever ends the ticket, or the attempt, lets go of it

It is found under the tenant, the model and every token before its end, as for a prompt that begins
alike. Should it have to go all the same, the attempt fails, and the next one is sent everything.
"""

from diptych_contracts.ids import TransferId
from diptych_contracts.transfers import Reserve
from diptych_engine.pins import PrefixPins
from diptych_engine.port import EngineSpec, SequenceKey
from diptych_policy.prefixes import Prefix


class HeldPrefixes:
    """The prefixes that are pinned for tickets.

    Args:
        pins: The engine's; None: everything crosses.
        spec: The engine's.
    """

    def __init__(self, pins: PrefixPins | None, spec: EngineSpec) -> None:
        self._pins = pins
        self._model_base = spec.fingerprint.base
        self._block_tokens = spec.layout.block_tokens
        self._most_tokens = spec.prefix_tokens
        self._keys: dict[TransferId, SequenceKey] = {}

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._pins is not None

    def blocks(self, request: Reserve) -> int:
        """How many of its first blocks the engine has, and keeps from now on.

        Never all: a claim is about what follows them. None of what parks, which may wait for long,
        nor of a second attempt, whatever the first one failed of.
        """
        generation, size = request.generation, self._block_tokens
        if self._pins is None or not request.leaves_out or request.parking:
            return 0
        if generation.attempt > 1 or generation.prompt is not None:
            return 0
        known = (*generation.prompt_ids, *generation.prefix_ids)
        ids = known[: min(len(known) - 1, self._most_tokens)]
        if len(ids) < size:
            return 0
        key = SequenceKey(generation.request_id, generation.attempt)
        held = self._pins.pin(key, Prefix.of(generation.tenant, self._model_base, ids, size))
        if held:
            self._keys[request.transfer_id] = key
        return held

    def let_go(self, transfer_id: TransferId) -> None:
        """Nothing is imported under that ticket any more. Idempotent."""
        key = self._keys.pop(transfer_id, None)
        if key is not None and self._pins is not None:
            self._pins.unpin(key)
