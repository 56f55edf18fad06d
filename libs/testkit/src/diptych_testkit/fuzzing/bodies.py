"""Bodies good clients send, with every parameter there is: what cases are bent from."""

from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "pattern": "^[A-Z][a-z]+$"},
        "kind": {"enum": ["a", "b", 3, None]},
        "when": {"type": "string", "format": "date-time"},
        "size": {"type": "number", "minimum": 0, "exclusiveMaximum": 1e3, "multipleOf": 0.5},
        "inner": {"$ref": "#/$defs/node"},
        "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
_NAMED = {"name": "get_weather", "description": "Look.", "parameters": _SCHEMA, "strict": True}
_COMMON: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0.7,
    "top_p": 0.9,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "seed": 7,
    "stream": True,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "ignore_eos": False,
    "diptych": {"mode": "remote", "link": "tcp", "priority_class": "batch"},
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}
CHATS: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    {
        **_COMMON,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}], "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "assistant", "content": "Sunny.", "refusal": None, "annotations": []},
            {"role": "user", "content": "And tomorrow?"},
        ],
        "stream_options": {"include_usage": True},
        "stop": ["\n\n", "END"],
        "max_completion_tokens": 64,
        "n": 1,
        "tools": [{"type": "function", "function": _NAMED}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"5": 1.5, "7": -100},
    },
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Give me JSON"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True},
        },
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "max_tokens": 9,
        "store": False,
        "modalities": ["text"],
    },
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {"type": "function", "function": {"name": "a", "parameters": _SCHEMA}},
            {"type": "function", "function": {"name": "b", "strict": True, "parameters": _SCHEMA}},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "a"}]},
        },
    },
)
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {**_COMMON, "prompt": "Once", "max_tokens": 5, "logprobs": 2, "n": 2, "stop": "x"},
    {"model": "tiny", "prompt": ["a", "b"], "echo": True, "best_of": 1, "suffix": ""},
    {"model": "tiny", "prompt": [1, 2, 3], "logit_bias": {"1": 1}},
    {"model": "tiny", "prompt": [[1, 2], [3]], "response_format": {"type": "json_object"}},
)
RESPONSES: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "input": "Hi"},
    {
        **_COMMON,
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Sunny."}],
            },
        ],
        "instructions": "Be brief.",
        "previous_response_id": "resp_" + "0" * 32,
        "max_output_tokens": 10,
        "store": True,
        "background": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}},
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": None},
        "truncation": "disabled",
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "context_management": [],
    },
)
FRAMES: tuple[dict[str, Any], ...] = tuple(
    {**body, "type": "response.create", "stream_id": "a", "generate": True} for body in RESPONSES
)
LINES: tuple[dict[str, Any], ...] = tuple(
    {"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    for n, body in enumerate(CHATS)
)
BATCHES: tuple[dict[str, Any], ...] = (
    {
        "input_file_id": "file-" + "0" * 32,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
)
TOKENS: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "prompt": "Once", "add_special_tokens": True, "return_token_strs": True},
    {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False},
    {"model": "tiny", "tokens": [1, 2, 300]},
    {"model": "tiny", "input": ["a", [1, 2]], "encoding_format": "float", "dimensions": 8},
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    _SCHEMA,
    {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "minProperties": 1},
    {"allOf": [{"type": "object"}, {"properties": {"a": {"const": [1, {"b": None}]}}}]},
    {"type": "array", "prefixItems": [{"type": "string"}], "minItems": 1, "maxItems": 9},
    {"oneOf": [{"type": "integer", "minimum": -5, "maximum": 5}, {"type": "boolean"}]},
    {"type": ["string", "null"], "maxLength": 20, "format": "uuid"},
)
KEYWORDS = (
    *("type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "properties", "required"),
    *("patternProperties", "additionalProperties", "minProperties", "maxProperties", "items"),
    *("prefixItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "multipleOf", "$defs", "definitions", "title"),
    *("#/$defs/node", "#", "object", "array", "string", "integer", "(a+)+$", "^(?=x)", "\\p{L}+"),
    *("[a-z]{1,9999}", "((a{0,100}){0,100}){0,100}", "x-guidance", "email", "ipv6"),
)
