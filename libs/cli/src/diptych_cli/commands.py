"""The commands and what they take. Each imports its work only when it is called."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych_cli import catalogue
from diptych_cli.failing import CliError, need

_DEFAULT_PORT = 8080

_ABOUT = """\
Serve large language models with prefill and decode on separate workers.

  diptych up                          the whole stack on this machine, on port 8080
  diptych doctor                      can this machine run it?
  diptych models list                 weights known by name
"""

_UP = """\
Start NATS, one prefill worker, one decode worker, scheduler, power-governor and gateway, each a
process of its own, and stay in the foreground. Fetches the weights at the first start.
Ctrl-C stops everything.

  diptych up                          SmolLM2 135M at http://127.0.0.1:8080/v1
  diptych up --port 9000 --decode 2   another port, two decode workers
  diptych up --model ./my-model.gguf  weights of your own
  diptych up --model OWNER/REPO       weights from Hugging Face
  diptych up -v                       show every service's log, not only warnings

Settings of a service come from its environment, e.g. DIPTYCH_GATEWAY__MAX_IN_FLIGHT=64.
"""

_MODELS = """\
Weights known by name, and fetching them.

  diptych models list
  diptych models pull smollm2-135m
  diptych models pull OWNER/REPO:FILE.gguf
"""

_DOCTOR = """\
Check what the stack needs on this machine and say what to do. Exit code 1 if something is missing.

  diptych doctor
  diptych doctor --port 9000
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except CliError as err:
        sys.stderr.write(f"diptych: {err}\n")
        return err.code
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _parser(argparse.ArgumentParser, _ABOUT, prog="diptych")
    parser.set_defaults(run=lambda _: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_up(commands)
    _add_models(commands)
    _add_doctor(commands)
    return parser


def _add_up(commands: Any) -> None:
    up = _parser(commands.add_parser, _UP, name="up", help="the whole stack on this machine")
    up.add_argument("--port", type=_port, default=_DEFAULT_PORT, help="of the gateway (8080)")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    up.add_argument(
        "--model", default=catalogue.DEFAULT, help=f"name, file or OWNER/REPO ({catalogue.DEFAULT})"
    )
    up.add_argument("--dir", type=Path, help="what the stack remembers (a folder per port)")
    up.add_argument("--prefill", type=_count, default=1, help="prefill workers (1)")
    up.add_argument("--decode", type=_count, default=1, help="decode workers (1)")
    up.add_argument("--threads", type=_count, help="per worker (cores / workers)")
    up.add_argument(
        "-v", action="count", default=0, dest="verbosity", help="all log lines; -vv debug ones too"
    )
    up.set_defaults(run=_run_up)


def _add_models(commands: Any) -> None:
    models = _parser(commands.add_parser, _MODELS, name="models", help="weights, by name")
    models.set_defaults(run=lambda _: _help(models))
    verbs = models.add_subparsers(title="commands", metavar="COMMAND")
    listing = verbs.add_parser("list", help="what is known, and what is here")
    listing.set_defaults(run=lambda _: need("diptych_cli.models").show())
    pulling = verbs.add_parser("pull", help="fetch and verify")
    pulling.add_argument("name", nargs="?", default=catalogue.DEFAULT)
    pulling.set_defaults(run=lambda options: need("diptych_cli.models").pull(options.name))


def _add_doctor(commands: Any) -> None:
    doctor = _parser(commands.add_parser, _DOCTOR, name="doctor", help="can this machine run it?")
    doctor.add_argument("--port", type=_port, default=_DEFAULT_PORT, help="of the gateway (8080)")
    doctor.set_defaults(run=lambda options: need("diptych_cli.doctor").doctor(options.port))


def _run_up(options: argparse.Namespace) -> int:
    up = need("diptych_cli.up")
    wanted = up.UpOptions(
        port=options.port,
        host=options.host,
        model=options.model,
        directory=options.dir,
        prefill=options.prefill,
        decode=options.decode,
        threads=options.threads,
        verbosity=options.verbosity,
    )
    return int(up.up(wanted))


def _parser(make: Any, about: str, **options: Any) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = make(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )
    return made


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65535, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)
