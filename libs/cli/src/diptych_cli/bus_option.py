"""`--nats-url`: another bus than the running stack's. `--url` is an HTTP server's, everywhere."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class _FormerlyUrl(argparse.Action):
    """`--url` where it meant the bus: understood until the next release, with a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        sys.stderr.write("diptych: --url is called --nats-url here, since it names a bus\n")
        setattr(namespace, self.dest, values)


def add_nats_url(parser: argparse.ArgumentParser, *, formerly_url: bool = True) -> None:
    """Have `parser` take `--nats-url`, as `options.nats_url`."""
    parser.add_argument("--nats-url", "--nats", metavar="URL", help="another NATS than the stack's")
    if formerly_url:
        parser.add_argument("--url", dest="nats_url", action=_FormerlyUrl, help=argparse.SUPPRESS)
