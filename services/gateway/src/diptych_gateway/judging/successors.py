"""Parameters that other servers or other endpoints have, and what is said instead here."""

from collections.abc import Mapping

_SCHEMA = "'response_format' (Responses: 'text.format') with a JSON schema"
_ONE_OF = f"{_SCHEMA} with 'enum'"
_PATTERN = f"{_SCHEMA} of a string with 'pattern'"
_EFFORT = "'reasoning_effort' (Responses: 'reasoning.effort')"
_LIMIT = "'max_completion_tokens' (completions: 'max_tokens', Responses: 'max_output_tokens')"
_BEAMS = "none; 'n' gives several answers"
_CLASS = "'service_tier', or 'diptych': {'priority_class': ...}"
_PROMPT = "'/tokenize' and '/v1/completions' with token ids, which make a prompt of your own"

SUCCESSORS: Mapping[str, str] = {
    "guided_json": _SCHEMA,
    "guided_choice": _ONE_OF,
    "guided_regex": _PATTERN,
    "guided_grammar": f"none; {_SCHEMA} is what there is",
    "guided_decoding_backend": _SCHEMA,
    "guided_whitespace_pattern": _SCHEMA,
    "structured_outputs": _SCHEMA,
    "json_schema": _SCHEMA,
    "regex": _PATTERN,
    "ebnf": f"none; {_SCHEMA} is what there is",
    "format": _SCHEMA,
    "best_of": "'n'",
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "stop_token_ids": "'stop', with text",
    "min_tokens": "none; 'ignore_eos' lets an answer go on to 'max_tokens'",
    "include_stop_str_in_output": "none",
    "prompt_logprobs": "none; prompts have no logprobs here",
    "echo": "'echo' of '/v1/completions'",
    "add_generation_prompt": _PROMPT,
    "chat_template": _PROMPT,
    "chat_template_kwargs": _EFFORT,
    "enable_thinking": _EFFORT,
    "thinking": _EFFORT,
    "reasoning": _EFFORT,
    "reasoning_effort": _EFFORT,
    "priority": _CLASS,
    "max_new_tokens": _LIMIT,
    "num_predict": _LIMIT,
    "max_tokens": _LIMIT,
    "max_completion_tokens": _LIMIT,
    "max_output_tokens": _LIMIT,
    "response_format": "'text.format'",
    "text": "'response_format'",
    "instructions": "a message of role 'system'",
    "input": "'messages' (completions: 'prompt')",
    "messages": "'input' (Responses) or 'prompt' (completions)",
    "extra_body": "what it holds, beside the other parameters: a client's library does that",
    "extra_headers": "headers: a client's library does that",
}
"""By the name that is unknown. What an endpoint takes is never looked up for it."""


def hint(name: str) -> str:
    """What an error message says of an unknown parameter; empty if there is nothing to say."""
    successor = SUCCESSORS.get(name)
    return "" if successor is None else f"; here it is {successor}"
