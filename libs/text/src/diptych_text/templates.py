"""A model's chat template, ready to render."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from diptych_contracts.errors import InvalidRequest, Permanent
from diptych_text.metering import MAX_CHARS, Meter, current
from diptych_text.sandbox import TemplateSandbox

MAX_TEMPLATE_CHARS = 256 * 1024
"""Ten times the longest template in use."""


class ChatTemplate:
    """Turns messages into prompt text.

    Args:
        source: The model's Jinja template; empty for a model without one.
        bos_token: Text the template knows as `bos_token`.
        eos_token: Text the template knows as `eos_token`.

    Raises:
        Permanent: if `source` is not a template.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self._source = source
        self._template = _compiled(source) if source else None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def knows(self, name: str) -> bool:
        """Whether the template says anything of the variable `name`."""
        return name in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of `messages`.

        Args:
            messages: Each with `role` and `content`.
            add_generation_prompt: End with the header of the assistant's answer.
            tools: In OpenAI's form.
            variables: What else the template is told.

        Raises:
            InvalidRequest: if there is no template, or it refuses, fails, or does too much.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use text completions")
        known = {
            **(variables or {}),
            **self._tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
        }
        token = current.set(Meter())
        try:
            return _joined(self._template, known)
        except (InvalidRequest, MemoryError, RecursionError, TemplateError) as err:
            raise _refusal(err) from err
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as err:
            # What an expression of the template can raise on data it does not expect.
            raise _refusal(err) from err
        finally:
            current.reset(token)


def _compiled(source: str) -> Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise Permanent(
            f"the chat template has {len(source)} characters; {MAX_TEMPLATE_CHARS} are allowed"
        )
    try:
        return TemplateSandbox().from_string(source)
    except TemplateSyntaxError as err:
        raise Permanent(f"the chat template is broken at line {err.lineno}: {err.message}") from err
    except (RecursionError, SyntaxError, TemplateError, ValueError) as err:
        raise Permanent(f"the chat template cannot be compiled: {err}") from err


def _joined(template: Template, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_CHARS:
            raise InvalidRequest(f"the prompt is longer than {MAX_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _refusal(err: BaseException) -> InvalidRequest:
    if isinstance(err, InvalidRequest):
        return InvalidRequest(str(err), param="messages", code="template_error")
    detail = str(err) or type(err).__name__
    return InvalidRequest(
        f"the chat template cannot render these messages: {detail:.200}",
        param="messages",
        code="template_error",
    )
