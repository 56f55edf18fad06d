"""How much of a transfer ran while the engine computed. Pure: told what happens, and when."""


class Overlap:
    """One transfer's time, in seconds of its writer's clock.

    Bytes are moved by exports, on the engine's thread, and in batches, on the link's. An export
    takes the engine's own time, so it never counts as hidden; a batch does, until the context is
    computed.
    """

    def __init__(self) -> None:
        self.moving_s = 0.0
        """Exports and batches together."""
        self.computed_s: float | None = None
        """When the context was computed; None: not yet."""
        self._exporting_s = 0.0
        self._batches_s = 0.0
        self._batch_s: float | None = None
        self._hidden_s = 0.0

    def export_began(self, now_s: float, *, last: bool) -> None:
        """A block is final, perhaps the `last` one: nothing of the context is computed after it.

        Where one chunk ends two blocks, the export of the first (0.3 ms) counts as compute.
        """
        self._exporting_s = now_s
        if last and self.computed_s is None:
            under_way_s = 0.0 if self._batch_s is None else now_s - self._batch_s
            self._hidden_s = self._batches_s + under_way_s
            self.computed_s = now_s

    def export_ended(self, now_s: float) -> None:
        """It lies in its buffer."""
        self.moving_s += now_s - self._exporting_s

    def batch_began(self, now_s: float) -> None:
        """The link's thread packs and sends what waits."""
        self._batch_s = now_s

    def batch_ended(self, now_s: float) -> None:
        """It has arrived, or the link has failed."""
        if self._batch_s is not None:
            self.moving_s += now_s - self._batch_s
            self._batches_s += now_s - self._batch_s
        self._batch_s = None

    @property
    def frac(self) -> float:
        """Share of the moving that ran while the engine computed, 0 to 1."""
        return min(1.0, self._hidden_s / self.moving_s) if self.moving_s else 0.0
