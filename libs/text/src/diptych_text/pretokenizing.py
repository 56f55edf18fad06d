r"""How text is cut into words before byte pairs are merged, by `tokenizer.ggml.pre`.

A model was trained with one of these cuts; another one gives other tokens and worse answers without
any error, so an unknown kind is refused. The patterns are applied one after the other, each to the
pieces the former left; what a pattern does not match stays a piece of its own.
"""

from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import Permanent

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class WordCut:
    """One kind of cut."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    """Take a word that is in the vocabulary as it is, without merging up to it."""
    add_bos: bool = False
    """Whether a prompt begins with BOS if the file does not say."""


_GPT2_CUT = WordCut((_GPT2,))
_DIGIT_CUT = WordCut((r"\p{N}", _GPT2))
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_CUT = WordCut((rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}",))

_CUTS = {
    "default": WordCut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_CUT,
    "phi-2": _GPT2_CUT,
    "olmo": _GPT2_CUT,
    "mpt": _GPT2_CUT,
    "smollm": _DIGIT_CUT,
    "starcoder": _DIGIT_CUT,
    "refact": _DIGIT_CUT,
    "command-r": _DIGIT_CUT,
    "codeshell": _DIGIT_CUT,
    "llama-bpe": WordCut((_LLAMA3,), whole_words_first=True, add_bos=True),
    "qwen2": _QWEN2_CUT,
    "stablelm2": _QWEN2_CUT,
    "deepseek-r1-qwen": _QWEN2_CUT,
}

KINDS = frozenset(_CUTS)
"""Every kind known."""


def word_cut(kind: str) -> WordCut:
    """The cut that `tokenizer.ggml.pre` names.

    Raises:
        Permanent: for a kind this build does not know.
    """
    cut = _CUTS.get(kind)
    if cut is None:
        known = ", ".join(sorted(_CUTS))
        raise Permanent(f"tokenizer.ggml.pre is {kind!r:.80}; known kinds are {known}")
    return cut


def as_json(cut: WordCut) -> dict[str, Any]:
    """`cut` as the `pre_tokenizer` of a `tokenizers` file, bytes mapped to letters at the end."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in cut.patterns
    ]
    steps.append(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    )
    return {"type": "Sequence", "pretokenizers": steps}
