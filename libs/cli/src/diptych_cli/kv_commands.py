"""`diptych kv`: its commands, and what they take."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from diptych_cli import teaching
from diptych_cli.failing import need


def add(
    commands: Any,
    *,
    where: Callable[[argparse.ArgumentParser], None],
    bus: Callable[[argparse.Namespace], str],
) -> None:
    """Add the command; `where` adds what names a stack, `bus` gives its bus."""
    kv = _parser(commands.add_parser, "kv", teaching.KV, "KV transfers on their way, blocks")
    _transfers(kv, where, bus)
    kv.set_defaults(ended=0, json=False, watch=False)
    verbs = kv.add_subparsers(title="commands", metavar="COMMAND")
    # Without defaults of their own: what stands before the verb counts too.
    verb = partial(verbs.add_parser, argument_default=argparse.SUPPRESS)
    transfers = _parser(verb, "transfers", teaching.KV, "what is on its way (as without a command)")
    _transfers(transfers, where, bus)
    blocks = _parser(verb, "blocks", teaching.KV_BLOCKS, "what holds which slots")
    _json(blocks)
    where(blocks)
    blocks.set_defaults(run=lambda o: need("diptych_cli.kv_blocks").blocks(bus(o), as_json=o.json))
    tiers = _parser(verb, "tiers", teaching.KV_TIERS, "where KV is kept beyond the engines")
    _json(tiers)
    where(tiers)
    tiers.set_defaults(run=lambda o: need("diptych_cli.kv_tiers").tiers(bus(o), as_json=o.json))
    trace = _parser(verb, "trace", teaching.KV_TRACE, "the story of one, from both sides")
    trace.add_argument("id", help="of a request or a transfer; or its beginning")
    _json(trace)
    where(trace)
    trace.set_defaults(
        run=lambda o: need("diptych_cli.kv_trace").trace(bus(o), o.id, as_json=o.json)
    )


def _transfers(
    parser: argparse.ArgumentParser,
    where: Callable[[argparse.ArgumentParser], None],
    bus: Callable[[argparse.Namespace], str],
) -> None:
    absent = argparse.SUPPRESS
    parser.add_argument("--ended", type=_number, default=absent, help="so many ended ones too")
    _json(parser)
    parser.add_argument(
        "--watch", action="store_true", default=absent, help="twice a second until Ctrl-C"
    )
    where(parser)
    parser.set_defaults(
        run=lambda o: need("diptych_cli.kv").kv(
            bus(o), ended=o.ended, as_json=o.json, watch=o.watch
        )
    )


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="one line of JSON"
    )


def _parser(
    add_parser: Callable[..., argparse.ArgumentParser], name: str, about: str, short: str
) -> argparse.ArgumentParser:
    made = add_parser(
        name, help=short, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return made


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return int(text)
