"""The commands about who a process is on the bus."""

import argparse
from pathlib import Path
from typing import Any

from diptych_cli import teaching
from diptych_cli.failing import need

_ROLES = (
    *("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor"),
    *("supervisor", "operator", "observer"),
)


def add(commands: Any) -> None:
    """`diptych certs`."""
    certs = _parser(commands, "certs", teaching.CERTS, "who a process is on the bus")
    certs.set_defaults(run=lambda _: _help(certs))
    verbs = certs.add_subparsers(title="commands", metavar="COMMAND")
    making = verbs.add_parser("make", help="an authority and keys of every role, in a folder")
    making.add_argument("--host", action="append", default=[], help="where the server is reached")
    issuing = verbs.add_parser("issue", help="an identity; prints its file")
    issuing.add_argument("role", choices=_ROLES)
    issuing.add_argument("--name", default="", help="of the process (a new one)")
    issuing.add_argument("--ttl", default="24h", metavar="TIME", help="how long it counts (24h)")
    issuing.add_argument("--out", type=Path, metavar="FILE", help="(beside the keys)")
    rotating = verbs.add_parser("rotate", help="a new certificate, or a new key of a role")
    rotating.add_argument("what", choices=("server", *_ROLES))
    rotating.add_argument("--host", action="append", default=[], help="where the server is reached")
    retiring = verbs.add_parser("retire", help="end a role's key before the last")
    retiring.add_argument("role", choices=_ROLES)
    revoking = verbs.add_parser("revoke", help="have an identity count no more")
    revoking.add_argument("who", metavar="FILE|KEY", help="its file, or its public key (U...)")
    for verb in (making, issuing, rotating, retiring, revoking):
        verb.add_argument("--keys", type=Path, metavar="DIR", help="the folder (the stack's)")
        verb.add_argument("--port", type=int, help="of the stack (the only one that runs)")
        verb.add_argument("--dir", type=Path, help="of the stack, if it was started with --dir")
    making.set_defaults(run=lambda o: _certs().make(_keys(o), o.host))
    issuing.set_defaults(run=_run_issue)
    rotating.set_defaults(run=lambda o: _certs().rotate(_keys(o), o.what, o.host))
    retiring.set_defaults(run=lambda o: _certs().retire(_keys(o), o.role))
    revoking.set_defaults(run=lambda o: _certs().revoke(_keys(o), o.who))


def _run_issue(options: argparse.Namespace) -> int:
    ttl_s = need("diptych_cli.identities").span_s(options.ttl)
    wanted = _certs().Issued(options.role, options.name, ttl_s, options.out)
    return int(_certs().issue(_keys(options), wanted))


def _certs() -> Any:
    return need("diptych_cli.certs")


def _keys(options: argparse.Namespace) -> Path:
    """The folder the command is about."""
    if options.keys:
        return Path(options.keys)
    folder = need("diptych_cli.issuing").FOLDER
    if options.dir:
        return Path(options.dir) / str(folder)
    if options.port:
        return Path(need("diptych_cli.folders").state() / str(options.port)) / str(folder)
    return Path(need("diptych_cli.presence").find().trust).parent


def _parser(commands: Any, name: str, about: str, short: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, description=about, help=short, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return made


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0
