"""What prefill gives to decode: every field of the engine's own description, as bytes.

Integer keys (of logprobs) do not survive every codec, so a position's logprobs travel as a list of
(token, logprob, rank). Whatever the reading side's engine does not know is refused: half a
description would leave prefill's KV pinned and decode without it. Never logged: it opens KV.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from diptych_contracts.errors import Incompatible, Permanent, Unverified
from diptych_contracts.handoffs import EngineHandOff
from diptych_engine.tensorrt_llm.package import Package

ENGINE = "tensorrt_llm"
MAX_BYTES = 512 * 1024
"""Of one description: the bus takes a megabyte, prompt included."""
_LOGPROBS = "__logprobs__"


class Envelope(msgspec.Struct, frozen=True, kw_only=True, tag="trtllm_hand_off.1"):
    """What travels."""

    engine_version: str
    prompt_tokens: int
    """Length of what was computed: decode must be given the same tokens."""
    fields: dict[str, Any]
    """By the names in the engine's `DisaggregatedParams`."""


def fields_set(params: Any) -> dict[str, Any]:
    """Every field of the engine's description that is not none."""
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return {name: value for name, value in values.items() if value is not None}


def sealed(fields: Mapping[str, Any], *, version: str, prompt_tokens: int) -> bytes:
    """`fields` as bytes.

    Raises:
        Permanent: one cannot travel (a tensor), or they are too long.
    """
    flat = {}
    for name, value in fields.items():
        try:
            flat[name] = _flat(value)
            msgspec.msgpack.encode(flat[name])
        except (TypeError, OverflowError) as err:
            raise Permanent(f"field {name} of the engine's hand-off cannot travel: {err}") from err
    data = msgspec.msgpack.encode(
        Envelope(engine_version=version, prompt_tokens=prompt_tokens, fields=flat)
    )
    if len(data) > MAX_BYTES:
        raise Permanent(f"the engine's hand-off has {len(data)} bytes, {MAX_BYTES} may travel")
    return data


def opened(
    hand_off: EngineHandOff, *, version: str, prompt_tokens: int, known: frozenset[str] | None
) -> Envelope:
    """What is in a hand-off.

    Args:
        hand_off: As it came.
        version: This side's engine.
        prompt_tokens: How many decode was given.
        known: The fields that this side's engine knows; None: it refuses others itself.

    Raises:
        Incompatible: the other side runs another version, or its hand-off has fields that this
            engine does not know.
        Unverified: it is of another prompt.
    """
    try:
        envelope = msgspec.msgpack.decode(hand_off.opaque, type=Envelope)
    except (msgspec.DecodeError, RecursionError) as err:
        raise Incompatible(f"the hand-off is none of TensorRT-LLM's: {err}") from err
    if envelope.engine_version != version:
        raise Incompatible(
            f"engine version: prefill runs TensorRT-LLM {envelope.engine_version}, "
            f"decode {version}: both must run the same"
        )
    if known is not None and (unknown := sorted(set(envelope.fields) - known)):
        raise Incompatible(
            f"the hand-off has fields that TensorRT-LLM {version} does not know here: "
            f"{', '.join(unknown)}; both sides must run the same build"
        )
    if envelope.prompt_tokens != prompt_tokens:
        raise Unverified(f"the hand-off is of {envelope.prompt_tokens} tokens, not {prompt_tokens}")
    return envelope


def made(envelope: Envelope, package: Package, **changes: Any) -> Any:
    """The engine's own object again, with `changes`.

    Raises:
        Incompatible: its fields are not of the form they have here.
    """
    try:
        fields = {name: _whole(value, package) for name, value in envelope.fields.items()}
        return package.DisaggregatedParams(**{**fields, **changes})
    except (TypeError, ValueError, RecursionError) as err:
        what = f"{type(err).__name__}: {err}"[:200]
        raise Incompatible(f"the hand-off cannot be made again: {what}") from err


def _flat(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_flat(one) for one in value]
    if isinstance(value, dict):
        if value and all(hasattr(one, "logprob") for one in value.values()):
            rows = [[int(token), one.logprob, one.rank] for token, one in value.items()]
            return {_LOGPROBS: rows}
        return {key: _flat(one) for key, one in value.items()}
    return value


def _whole(value: Any, package: Package) -> Any:
    if isinstance(value, list):
        return [_whole(one, package) for one in value]
    if isinstance(value, dict):
        if set(value) == {_LOGPROBS}:
            return {
                token: package.Logprob(logprob=logprob, rank=rank)
                for token, logprob, rank in value[_LOGPROBS]
            }
        return {key: _whole(one, package) for key, one in value.items()}
    return value
