"""One model's text side, from its card alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer

from diptych_contracts.answer_formats import Tool
from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import InvalidRequest, Permanent
from diptych_text.cutting import MAX_UNCUT_CHARS, Cutter
from diptych_text.formats import NO_FORMAT, Family, check_names, family_of
from diptych_text.gguf_tokenizer import SPACE
from diptych_text.panics import panic_as
from diptych_text.shielding import Shield
from diptych_text.template_traits import TemplateTraits, traits_of
from diptych_text.templates import ChatTemplate
from diptych_text.tool_messages import about_tools, prepared

_TAIL_TOKENS = 32
_SHORT_CHARS = 4096
"""About 2 ms of tokenizing."""


def _byte_letters() -> dict[str, int]:
    """The byte each letter of a byte-level vocabulary stands for.

    Printable Latin-1 bytes stand for themselves; the other 68 follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def _named(name: str, seen: str) -> str:
    return "" if name == NO_FORMAT else name or seen


class _Model(msgspec.Struct):
    byte_fallback: bool = False


class _TokenizerFile(msgspec.Struct):
    """The one thing of a `tokenizers` file that the library does not tell."""

    model: _Model


class TextCodec:
    """Renders, encodes and decodes for one model.

    Use `from_card`. Loading takes about 0.1 s for 49,000 tokens; afterwards every call is cheap and
    nothing is remembered but the bytes of tokens seen. Not for use by two threads at once.
    """

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, *, byte_level: bool) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        added = tokenizer.get_added_tokens_decoder()
        self._ids_of_control = {t.content: i for i, t in added.items() if t.special}
        self._control = frozenset(self._ids_of_control.values())
        self._verbatim = frozenset(added) - self._control
        self._bytes: dict[int, bytes] = {}
        self.control_texts = frozenset(t.content for t in added.values() if t.special)
        self._cutter = Cutter(t.content for t in added.values()) if byte_level else None
        self._shield = Shield(self.control_texts, card.chat_template)
        self._template = ChatTemplate(
            card.chat_template,
            bos_token=self._text(card.bos_id),
            eos_token=self._text(card.eos_ids[0] if card.eos_ids else None),
        )

    @classmethod
    def from_card(cls, card: ModelCard) -> "TextCodec":
        """The codec for `card`.

        Raises:
            Permanent: if the card's tokenizer or template is broken.
        """
        try:
            header = msgspec.json.decode(card.tokenizer_json, type=_TokenizerFile)
            with panic_as(Permanent):
                tokenizer = Tokenizer.from_str(card.tokenizer_json)
        except Exception as err:  # `tokenizers` raises bare Exception
            raise Permanent(f"the card of {card.model} has no usable tokenizer: {err}") from err
        try:
            check_names(tools=card.tool_parser, reasoning=card.reasoning_parser)
        except ValueError as err:
            raise Permanent(f"the card of {card.model}: {err}") from err
        return cls(card, tokenizer, byte_level=not header.model.byte_fallback)

    @cached_property
    def family(self) -> Family:
        """How the model writes calls and reasoning: as its card says, or its template."""
        card, seen = self._card, family_of(self._card.chat_template)
        return Family(
            _named(card.tool_parser, seen.tools), _named(card.reasoning_parser, seen.reasoning)
        )

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template can say of tools; probed at the first need."""
        return traits_of(self._template)

    def knows(self, variable: str) -> bool:
        """Whether the template says anything of `variable`."""
        return self._template.knows(variable)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the model's own template.

        Args:
            messages: Each with `role` and `content` (a string), and what else the template knows.
            add_generation_prompt: End with the header of the assistant's answer.
            tools: What the model may call, in the form the template takes.
            variables: What else the template is told.

        Raises:
            InvalidRequest: if the template refuses the messages, fails, or yields too much.
        """
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The token ids of `text`; control tokens written out in it become their ids.

        For text of our own: what clients wrote goes through `encode_chat`.

        Args:
            text: Any text, such as `render` gives.
            add_bos: Begin with BOS. None: as the model wants it, unless the text begins so already.

        Raises:
            InvalidRequest: for text that is not valid Unicode (lone surrogates), or too much of it
                without a place for a cut (`cutting`).
        """
        return self._begun(self._ids(text), add_bos)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation: `render` and `encode`, safe for what clients wrote.

        The template's control tokens become their ids; such in the messages and tools stay text.
        Calls and tools come in OpenAI's form (`tool_messages`).

        Raises:
            InvalidRequest: what `render` and `encode` raise.
        """
        parts = self.chat_parts(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
        return [token for part in parts for token in part]

    def chat_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Iterator[list[int]]:
        """What `encode_chat` gives, part by part, each of them some 20 ms of work (`cutting`).

        Others may use the codec between two parts, on the same thread. Nothing is done, nor
        rendered, before the first part is asked for.
        """
        listed: Sequence[Mapping[str, Any]] | None = None
        if tools or about_tools(messages):
            messages, listed = prepared(messages, tools, self.traits)
        mark, messages, listed = self._shield.marked(messages, listed)
        text = self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=listed,
            variables=variables,
        )
        yield from self._parts(self._shield.pieces(text, mark) if mark else [(True, text)])

    def text_parts(self, text: str, *, add_bos: bool | None = None) -> Iterator[list[int]]:
        """What `encode` gives, part by part as `chat_parts` does."""
        return self._parts([(True, text)], add_bos)

    def _parts(
        self, pieces: Iterable[tuple[bool, str]], add_bos: bool | None = None
    ) -> Iterator[list[int]]:
        """The ids of texts in which control tokens count, or stay text."""
        begun = False
        for control, piece in pieces:
            for part in self._cutter.parts(piece) if self._cutter is not None else (piece,):
                ids = self._ids(part) if control else self._plain_ids(part)
                if ids and not begun:
                    ids, begun = self._begun(ids, add_bos), True
                yield ids
        if not begun:
            yield self._begun([], add_bos)

    def _ids(self, text: str) -> list[int]:
        if len(text) > MAX_UNCUT_CHARS:
            raise InvalidRequest(
                f"expected words: {len(text)} characters stand together, "
                f"at most {MAX_UNCUT_CHARS} are allowed",
                code="invalid_text",
            )
        try:
            if len(text) > _SHORT_CHARS:  # only so does the library let other threads run
                batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
                return list(batch[0].ids)
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as err:
            raise InvalidRequest(f"text is not valid Unicode: {err}", code="invalid_text") from err
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        """The ids of `text`, none of them a control token's."""
        self._tokenizer.encode_special_tokens = True
        try:
            ids = self._ids(text)
        finally:
            self._tokenizer.encode_special_tokens = False
        if not self._control.isdisjoint(ids):  # a vocabulary that merges up to one
            raise InvalidRequest(
                "the messages hold control tokens of the model",
                param="messages",
                code="invalid_text",
            )
        return ids

    def _begun(self, ids: list[int], add_bos: bool | None) -> list[int]:
        bos = self._card.bos_id
        if add_bos is None:
            add_bos = self._card.add_bos and ids[:1] != [bos]
        return [bos, *ids] if add_bos and bos is not None else ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; empty for control tokens and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    def written(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, control tokens written out; what is no UTF-8 becomes U+FFFD."""
        return b"".join(
            self._text(token).encode() if token in self._control else self.token_bytes(token)
            for token in token_ids
        ).decode("utf-8", "replace")

    def control_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of `texts` that are control tokens, and which."""
        known = self._ids_of_control
        return {text: known[text] for text in texts if text in known}

    def ends_with(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether the last tokens spell `text` (a marker, perhaps one token), blanks apart."""
        tail = token_ids[-_TAIL_TOKENS:]
        spelled = "".join(
            self._text(token)
            if token in self._control
            else self.token_bytes(token).decode("utf-8", "replace")
            for token in tail
        )
        return spelled.rstrip().endswith(text)

    def is_control(self, token_id: int) -> bool:
        """Whether the token steers the model and is never shown."""
        return token_id in self._control

    def control_text(self, token_id: int) -> str:
        """How a control token is written; others as in the tokenizer's file; no unknown one."""
        return self._text(token_id)

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        return self._card.vocab_size

    def _text(self, token_id: int | None) -> str:
        return "" if token_id is None else (self._tokenizer.id_to_token(token_id) or "")

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._control or not 0 <= token_id < self._card.vocab_size:
            return b""
        text = self._text(token_id)
        if token_id in self._verbatim:
            return text.encode()
        if self._byte_level:
            return b"".join(
                bytes([_BYTE_OF_LETTER[c]]) if c in _BYTE_OF_LETTER else c.encode() for c in text
            )
        if len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace(SPACE, " ").encode()
