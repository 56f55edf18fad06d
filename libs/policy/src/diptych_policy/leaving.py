"""When a scheduler that was asked to stop may leave."""

from collections.abc import Collection

from diptych_contracts.ids import Incarnation


def may_leave(live: int, replicas: Collection[Incarnation], *, left_s: float) -> bool:
    """Whether nothing is gained by staying.

    Its requests run on without it: another replica adopts their records a second after the last
    beat. Without one they would wait for the next scheduler to start, so a lone one finishes them.

    Args:
        live: Requests it answers for.
        replicas: Other schedulers that serve.
        left_s: How much longer it may take.
    """
    return not live or bool(replicas) or left_s <= 0
