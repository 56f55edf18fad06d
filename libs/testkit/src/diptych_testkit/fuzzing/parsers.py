"""Every parser that is fuzzed, by name."""

from collections.abc import Mapping

from diptych_testkit.fuzzing import (
    bus_parsers,
    codec_parsers,
    gguf_parsers,
    http_parsers,
    kv_parsers,
    kv_wire_parsers,
    text_parsers,
    tier_parsers,
)
from diptych_testkit.fuzzing.cases import Parser

PARSERS: Mapping[str, Parser] = {
    parser.name: parser
    for room in (
        http_parsers,
        bus_parsers,
        kv_parsers,
        kv_wire_parsers,
        codec_parsers,
        gguf_parsers,
        text_parsers,
        tier_parsers,
    )
    for parser in room.parsers()
}
