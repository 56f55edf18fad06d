"""In which order queued requests are placed: by class, then first come, first served."""

from diptych_contracts.requests import PriorityClass

_RANK = {priority_class: rank for rank, priority_class in enumerate(PriorityClass)}


def order_key(priority_class: PriorityClass, arrival: int) -> tuple[int, int]:
    """Sorts before what is served later. `arrival` counts up."""
    return (_RANK[priority_class], arrival)
