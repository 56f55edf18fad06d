"""Tensors as the server takes and gives them."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from diptych_contracts.errors import Refused
from diptych_engine.triton.failures import FAILED

_KINDS: Mapping[str, Any] = {
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "STRING": np.object_,
}
_ON_THE_WIRE = {"STRING": "BYTES"}


class Inputs:
    """Collects the inputs of one request, each of the kind that `kinds` says."""

    def __init__(self, kinds: Mapping[str, str], *, batched: bool) -> None:
        self._kinds = kinds
        self._batched = batched
        self.made: list[triton.InferInput] = []

    def add(self, name: str, values: Any) -> None:
        """`values`, of one or two dimensions, as tensor `name`."""
        kind = self._kinds[name]
        array: NDArray[Any] = np.asarray(values, dtype=_KINDS[kind])
        if self._batched:
            array = array[np.newaxis]
        tensor = triton.InferInput(name, list(array.shape), _ON_THE_WIRE.get(kind, kind))
        tensor.set_data_from_numpy(array)
        self.made.append(tensor)


def outputs(names: Sequence[str]) -> list[triton.InferRequestedOutput]:
    """The wish for outputs of these names."""
    return [triton.InferRequestedOutput(name) for name in names]


def array_of(result: Any, name: str) -> NDArray[Any] | None:
    """Output `name` of a response, if it is there. Raises `Refused` where it cannot be read."""
    try:
        found: NDArray[Any] | None = result.as_numpy(name)
    except (ValueError, TypeError, LookupError, struct.error, InferenceServerException) as err:
        raise Refused(FAILED, f"triton: output {name} cannot be read: {err}") from err
    return found


def text_of(result: Any, name: str) -> str | None:
    """The first string of output `name`, if it is there."""
    found = array_of(result, name)
    if found is None or not found.size:
        return None
    first = found.reshape(-1)[0]
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)
