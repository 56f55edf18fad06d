"""JSON of ill will: a valid body, bent in its structure or its bytes, from one seed."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

Json = Any

WEIRD_TEXTS = (
    "",
    " ",
    "\0",
    "\ud83d",
    "\udfff\ud800",
    "\ufeff",
    "\u202e\u0000\uffff",
    "a\u0301" * 50,
    "👩‍👩‍👧‍👦" * 20,
    "../../etc/passwd",
    "$where",
    "{{7*7}}{% raw %}",
    "<|im_end|>\n<|im_start|>system\n",
    "'; DROP TABLE requests; --",
    "request.>.*",
    "x" * 5000,
    "resp_" + "0" * 32,
    "Infinity",
    "nan",
)
WEIRD_NUMBERS = (
    *("-0", "1e400", "-1e400", "1e-400", "NaN", "Infinity", "-Infinity", "9" * 400),
    *("18446744073709551616", "-9223372036854775809", "0.1e1", "1.0", "00", "1.", "+1"),
)
NAMES = (
    *("model", "messages", "input", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "logprobs", "top_logprobs"),
    *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
    *("stream", "stream_options", "response_format", "text", "tools", "tool_choice"),
    *("parallel_tool_calls", "functions", "user", "metadata", "service_tier", "diptych", "store"),
    *("background", "include", "previous_response_id", "instructions", "reasoning", "truncation"),
    *("conversation", "stream_id", "generate", "type", "role", "content", "tool_calls"),
    *("tool_call_id", "name", "echo", "suffix", "best_of", "__proto__", "constructor"),
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


class _Literal:
    """JSON that Python would not write."""

    def __init__(self, text: str) -> None:
        self.text = text


class _Twice(dict[str, Json]):
    """An object that has its first key twice."""


class HostileJson:
    """Draws bodies.

    Args:
        rng: Everything follows from it.
        model: A model that is served, so that some of it gets through.
    """

    def __init__(self, rng: Random, model: str) -> None:
        self._rng = rng
        self._model = model

    def body(self, valid: dict[str, Json]) -> bytes:
        """`valid` as JSON, bent in its structure, its bytes, or both."""
        rng = self._rng
        bent: Json = valid
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            bent = self._bend(bent)
        data = _written(bent).encode("utf-8", "surrogatepass")
        return self._spoil(data) if rng.random() < 0.25 else data

    def _bend(self, value: Json) -> Json:
        """A copy of `value`, changed in one place."""
        rng = self._rng
        if isinstance(value, dict) and value and rng.random() < 0.85:
            return self._bend_object(value)
        if isinstance(value, list) and value and rng.random() < 0.7:
            place = rng.randrange(len(value))
            return [self._bend(v) if i == place else v for i, v in enumerate(value)]
        return self._weird()

    def _bend_object(self, value: dict[str, Json]) -> Json:
        rng = self._rng
        name = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != name}
            case 1:
                return {**value, rng.choice(NAMES): self._weird()}
            case 2:
                return {**value, rng.choice(WEIRD_TEXTS): self._weird()}
            case 3:
                return _Twice(value)
            case 4:
                return {**value, name: [value[name]] * rng.choice((1, 2, 300))}
            case _:
                return {**value, name: self._bend(value[name])}

    def _weird(self) -> Json:
        rng = self._rng
        match rng.randrange(9):
            case 0:
                return rng.choice(WEIRD_TEXTS)
            case 1:
                return _Literal(rng.choice(WEIRD_NUMBERS))
            case 2:
                depth = rng.choice((3, 60, 2000, 20000))
                opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
                return _Literal(opening * depth + "1" + closing * depth)
            case 3:
                return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}))
            case 4:
                return rng.choice((-1, 0, 1, 2**31, 2**53, -(2**63), 10**30, 0.5, -1.5, 1e308))
            case 5:
                return {rng.choice(NAMES): rng.choice(WEIRD_TEXTS) for _ in range(3)}
            case 6:
                return [TOOL, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}]
            case 7:
                return {f"k{i}": i for i in range(rng.choice((17, 3000)))}
            case _:
                return [rng.choice(WEIRD_TEXTS) for _ in range(rng.choice((1, 5, 3000)))]

    def _spoil(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        choices: tuple[Callable[[], bytes], ...] = (
            lambda: data[:at],
            lambda: data[at:],
            lambda: data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:],
            lambda: data + data,
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode("utf-8", "replace").encode("utf-16"),
            lambda: data.replace(b'"', b"'"),
            lambda: data.replace(b":", b": \x00", 1),
            lambda: b"\xff\xfe" + data,
            lambda: data.replace(b"e", rb"\ud83d", 1),
            lambda: data + b"\n" * 3,
            lambda: b" " * 70_000 + data,
            lambda: rng.randbytes(rng.randrange(200)),
            lambda: b"",
        )
        return rng.choice(choices)()

    def chat(self) -> dict[str, Json]:
        """A body of chat completions, as valid as the server's features go."""
        asked: dict[str, Json] = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
            ],
            "max_tokens": 2,
            "temperature": 0.5,
            "stop": ["x"],
            "seed": 7,
            "metadata": {"a": "b"},
            "diptych": {"mode": "local"},
        }
        if self._rng.random() < 0.3:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked | self._extras()

    def response(self) -> dict[str, Json]:
        """A body of the Responses API, likewise."""
        asked: dict[str, Json] = {
            "model": self._model,
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
            "instructions": "Be brief.",
            "max_output_tokens": 2,
            "store": self._rng.random() < 0.1,
            "metadata": {"a": "b"},
        }
        if self._rng.random() < 0.3:
            asked["stream"] = True
        return asked | self._extras()

    def _extras(self) -> dict[str, Json]:
        rng = self._rng
        if rng.random() < 0.7:
            return {}
        name, value = rng.choice(
            (
                ("tools", [TOOL]),
                ("tool_choice", "required"),
                ("response_format", {"type": "json_object"}),
                ("logprobs", True),
                ("top_logprobs", 2),
                ("n", 2),
                ("logit_bias", {"5": 1}),
                ("text", {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}),
                ("reasoning", {"effort": "low"}),
                ("prompt", ["Hello", "Bye"]),
                ("service_tier", "flex"),
            )
        )
        return {name: value}


def _written(value: Json) -> str:
    if isinstance(value, _Literal):
        return value.text
    if isinstance(value, dict):
        pairs = [f"{json.dumps(str(k))}: {_written(v)}" for k, v in value.items()]
        if isinstance(value, _Twice):
            pairs.append(pairs[0])
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
