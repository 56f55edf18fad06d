"""The commands and what they take. Each imports its work only when it is called."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diptych_cli import access_commands, catalogue, certs_commands, kv_commands, teaching
from diptych_cli.bus_option import add_nats_url
from diptych_cli.failing import CliError, need

_DEFAULT_PORT = 8080
"""What `doctor` looks at."""
_SERVICES = ("gateway", "scheduler", "prefill-worker", "decode-worker", "power-governor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        if "identity" in options:
            need("diptych_cli.credentials").choose(options.identity)
        return int(options.run(options))
    except CliError as err:
        sys.stderr.write(f"diptych: {err}\n")
        return err.code
    except KeyboardInterrupt:
        return 130


_ENGINES = ("sglang", "tensorrt_llm", "triton", "trtllm_serve", "vllm")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _parser(argparse.ArgumentParser, teaching.DIPTYCH, prog="diptych")
    parser.set_defaults(run=lambda _: _help(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (
        _add_up,
        _add_scale,
        _add_chat,
        _add_batch,
        _add_top,
        _add_tap,
        _add_kv,
        _add_dead,
        *access_commands.ADDED,
        certs_commands.add,
        _add_models,
        _add_settings,
        _add_doctor,
    ):
        add(commands)
    return parser


def _add_up(commands: Any) -> None:
    up = _parser(
        commands.add_parser, teaching.UP, name="up", help="the whole stack on this machine"
    )
    up.add_argument("--port", type=_port, default=_DEFAULT_PORT, help="of the gateway (8080)")
    up.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    up.add_argument(
        "--model", default=catalogue.DEFAULT, help=f"name, file or OWNER/REPO ({catalogue.DEFAULT})"
    )
    up.add_argument("--dir", type=Path, help="what the stack remembers (a folder per port)")
    up.add_argument("--prefill", type=_number, default=1, help="prefill workers (1)")
    up.add_argument("--decode", type=_count, default=1, help="decode workers (1)")
    up.add_argument("--gateways", type=_count, default=1, help="gateways behind the port (1)")
    up.add_argument("--schedulers", type=_count, default=1, help="schedulers (1)")
    up.add_argument("--threads", type=_count, help="per worker (cores / workers)")
    up.add_argument(
        "--durable", action="store_true", help="survive a loss of power too (slower, see the docs)"
    )
    up.add_argument(
        "-v", action="count", default=0, dest="verbosity", help="all log lines; -vv debug ones too"
    )
    up.set_defaults(run=_run_up)


def _add_scale(commands: Any) -> None:
    scale = _parser(commands.add_parser, teaching.SCALE, name="scale", help="more or fewer workers")
    scale.add_argument("service", choices=("prefill", "decode", "gateways", "schedulers"))
    scale.add_argument("count", type=_number, help="how many from now on; 0 for prefill only")
    _add_where(scale)
    scale.set_defaults(
        run=lambda o: need("diptych_cli.scale").scale(_running(o), o.service, o.count)
    )


def _add_chat(commands: Any) -> None:
    chat = _parser(commands.add_parser, teaching.CHAT, name="chat", help="talk to a model")
    chat.add_argument("question", nargs="*", help="ask only this")
    chat.add_argument("--url", help="base URL of any OpenAI-compatible server")
    chat.add_argument("--model", help="its id there (the first one served)")
    chat.add_argument(
        "--system", default="You are a helpful assistant.", help="system message; '' for none"
    )
    chat.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy, best for small models (0)"
    )
    chat.add_argument("--max-tokens", type=_count, default=256, help="longest answer (256)")
    _add_where(chat)
    chat.set_defaults(run=_run_chat)


def _add_batch(commands: Any) -> None:
    batch = _parser(
        commands.add_parser, teaching.BATCH, name="batch", help="many requests, out of a file"
    )
    batch.add_argument("what", metavar="FILE|BATCH", help="JSONL, or the id of a batch to wait for")
    batch.add_argument("--output", type=Path, metavar="FILE", help="results (standard output)")
    batch.add_argument("--errors", type=Path, metavar="FILE", help="what failed (nowhere)")
    batch.add_argument("--url", help="base URL of any OpenAI-compatible server")
    _add_where(batch)
    batch.set_defaults(run=_run_batch)


def _add_top(commands: Any) -> None:
    top = _parser(commands.add_parser, teaching.TOP, name="top", help="the stack at a glance")
    top.add_argument("--once", action="store_true", help="print one table and exit")
    _add_where(top)
    top.set_defaults(run=lambda o: need("diptych_cli.top").top(_running(o), once=o.once))


def _add_tap(commands: Any) -> None:
    tap = _parser(commands.add_parser, teaching.TAP, name="tap", help="what goes over the bus")
    tap.add_argument("subject", nargs="?", default=">", help="which messages")
    tap.add_argument("--count", type=_count, help="exit after so many")
    tap.add_argument("--all", action="store_true", help="show token ids too")
    add_nats_url(tap, formerly_url=False)
    _add_where(tap)
    tap.set_defaults(run=_run_tap)


def _add_kv(commands: Any) -> None:
    kv_commands.add(commands, where=_add_bus, bus=_bus)


def _add_dead(commands: Any) -> None:
    dead = _parser(commands.add_parser, teaching.DEAD, name="dead", help="requests given up")
    dead.set_defaults(run=lambda _: _help(dead))
    verbs = dead.add_subparsers(title="commands", metavar="COMMAND")
    listing = verbs.add_parser("list", help="all of them, the newest last")
    listing.add_argument("--json", action="store_true", help="one line of JSON")
    showing = verbs.add_parser("show", help="everything about one")
    showing.add_argument("id", help="as a client, a log or the list shows it; or its beginning")
    showing.add_argument("--prompt", action="store_true", help="what was asked too")
    retrying = verbs.add_parser("retry", help="run it again, as a background response")
    retrying.add_argument("id", nargs="*", help="as above")
    retrying.add_argument("--all", action="store_true", help="every one not retried yet")
    retrying.add_argument("--again", action="store_true", help="although it was retried already")
    for verb in (listing, showing, retrying):
        add_nats_url(verb)
        _add_where(verb)
    listing.set_defaults(run=lambda o: _dead().show_all(_place(o), as_json=o.json))
    showing.set_defaults(run=lambda o: _dead().show_one(_place(o), o.id, prompt=o.prompt))
    retrying.set_defaults(run=_run_dead_retry)


def _dead() -> Any:
    return need("diptych_cli.dead")


def _place(options: argparse.Namespace) -> Any:
    """The bus that holds the dead requests, and where answers are read."""
    if options.nats_url:
        return _dead().Place(options.nats_url)
    stack = _running(options)
    return _dead().Place(stack.nats_url, stack.base_url)


def _run_dead_retry(options: argparse.Namespace) -> int:
    if bool(options.id) == options.all:
        raise CliError("name the requests to retry, or --all of them", code=2)
    retry = _dead().retry
    return int(retry(_place(options), options.id, every=options.all, again=options.again))


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, help="of the stack (the only one that runs)")
    parser.add_argument("--dir", type=Path, help="of the stack, if it was started with --dir")
    parser.add_argument("--identity", type=Path, metavar="FILE", help="who you are (its operator)")


def _add_bus(parser: argparse.ArgumentParser) -> None:
    add_nats_url(parser, formerly_url=False)
    _add_where(parser)


def _bus(options: argparse.Namespace) -> str:
    """The bus the command is about: as told, or that of the stack."""
    return str(options.nats_url or _running(options).nats_url)


def _running(options: argparse.Namespace) -> Any:
    """The stack the command is about."""
    return need("diptych_cli.presence").find(options.port, options.dir)


def _run_chat(options: argparse.Namespace) -> int:
    chat, asking = need("diptych_cli.chat"), need("diptych_cli.asking")
    url = options.url or _running(options).base_url
    # A key of somebody else's is none of a local stack's business.
    key = os.environ.get("OPENAI_API_KEY" if options.url else "DIPTYCH_API_KEY", "")
    wishes = chat.ChatOptions(
        model=options.model,
        system=options.system,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
    )
    return int(chat.chat(asking.Server(url, key), wishes, " ".join(options.question)))


def _run_batch(options: argparse.Namespace) -> int:
    batch, asking = need("diptych_cli.batch"), need("diptych_cli.asking")
    url = options.url or _running(options).base_url
    key = os.environ.get("OPENAI_API_KEY" if options.url else "DIPTYCH_API_KEY", "")
    wishes = batch.BatchOptions(output=options.output, errors=options.errors)
    return int(batch.batch(asking.Server(url, key), options.what, wishes))


def _run_tap(options: argparse.Namespace) -> int:
    url = options.nats_url or _running(options).nats_url
    tap = need("diptych_cli.tap").tap
    return int(tap(url, options.subject, count=options.count, everything=options.all))


def _add_models(commands: Any) -> None:
    models = _parser(commands.add_parser, teaching.MODELS, name="models", help="weights, by name")
    models.set_defaults(run=lambda _: _help(models))
    verbs = models.add_subparsers(title="commands", metavar="COMMAND")
    listing = verbs.add_parser("list", help="what is known, and what is here")
    listing.set_defaults(run=lambda _: need("diptych_cli.models").show())
    pulling = verbs.add_parser("pull", help="fetch and verify")
    pulling.add_argument(
        "name", nargs="?", default=catalogue.DEFAULT, help=f"or OWNER/REPO ({catalogue.DEFAULT})"
    )
    pulling.set_defaults(run=lambda options: need("diptych_cli.models").pull(options.name))


def _add_settings(commands: Any) -> None:
    settings = _parser(
        commands.add_parser, teaching.SETTINGS, name="settings", help="what can be set, by service"
    )
    settings.add_argument(
        "service", nargs="?", choices=_SERVICES, metavar="SERVICE", help=", ".join(_SERVICES)
    )
    settings.set_defaults(
        run=lambda o: need("diptych_cli.settings_of").show((o.service,) if o.service else _SERVICES)
    )


def _add_doctor(commands: Any) -> None:
    doctor = _parser(
        commands.add_parser, teaching.DOCTOR, name="doctor", help="can this machine run it?"
    )
    doctor.add_argument("--port", type=_port, default=_DEFAULT_PORT, help="of the gateway (8080)")
    doctor.set_defaults(run=lambda options: need("diptych_cli.doctor").doctor(options.port))
    parts = doctor.add_subparsers(title="parts", metavar="PART")
    engine = _parser(
        parts.add_parser, teaching.ENGINE_DOCTOR, name="engine", help="an engine of its own process"
    )
    engine.add_argument("name", metavar="NAME", choices=_ENGINES, help=", ".join(_ENGINES))
    engine.add_argument("--url", default="", help="where it listens")
    engine.set_defaults(
        run=lambda o: need("diptych_cli.engine_doctor").engine_doctor(o.name, o.url)
    )
    links = _parser(
        parts.add_parser, teaching.LINKS_DOCTOR, name="links", help="what KV crosses, and why"
    )
    _add_bus(links)
    links.set_defaults(run=lambda o: need("diptych_cli.link_doctor").doctor_links(lambda: _bus(o)))


def _run_up(options: argparse.Namespace) -> int:
    up = need("diptych_cli.up")
    wanted = up.UpOptions(
        port=options.port,
        host=options.host,
        model=options.model,
        directory=options.dir,
        prefill=options.prefill,
        decode=options.decode,
        gateways=options.gateways,
        schedulers=options.schedulers,
        threads=options.threads,
        durable=options.durable,
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


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)
