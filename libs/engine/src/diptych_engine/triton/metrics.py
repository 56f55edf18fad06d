"""How full an engine is, from the metrics page that TensorRT-LLM's C++ backend adds to."""

import http.client
import math
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from diptych_engine.request_port import EngineStats

MAX_PAGE_BYTES = 4 << 20
_LINE = re.compile(
    r"^nv_trt_llm_(?P<group>request|kv_cache_block)_metrics\{(?P<labels>[^}]*)\} (?P<value>\S+)$",
    re.M,
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Page:
    """What is said of one model."""

    requests: Mapping[str, float]
    """By `request_type`."""
    blocks: Mapping[str, float]
    """By `kv_cache_block_type`."""

    @property
    def stats(self) -> EngineStats:
        """As the port tells it."""
        used, size = self.blocks.get("used"), self.blocks.get("tokens_per")
        return EngineStats(
            running=_whole(self.requests.get("scheduled")),
            waiting=_whole(self.requests.get("waiting")),
            kv_tokens_used=None if used is None or size is None else int(used * size),
        )

    @property
    def kv_tokens(self) -> int | None:
        """Cells of the engine, once it has said so."""
        return int(self.blocks.get("max", 0) * self.blocks.get("tokens_per", 0)) or None


def read_page(text: str, model: str) -> Page:
    """The page's numbers about `model`."""
    found: dict[str, dict[str, float]] = {"request": {}, "kv_cache_block": {}}
    for line in _LINE.finditer(text):
        labels = dict(_LABEL.findall(line["labels"]))
        kind = labels.get("request_type") or labels.get("kv_cache_block_type")
        if labels.get("model") != model or kind is None:
            continue
        try:
            value = float(line["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            found[line["group"]][kind] = value
    return Page(found["request"], found["kv_cache_block"])


def fetch(url: str, timeout_s: float) -> str:
    """The page; blocks. Asked directly, whatever proxy the environment names. Raises `OSError`."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_s) as answer:
            body: bytes = answer.read(MAX_PAGE_BYTES)
    except http.client.HTTPException as err:  # what answers there speaks no HTTP, or stops short
        raise OSError(f"{type(err).__name__}: {err}") from err
    return body.decode("utf-8", "replace")


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
