"""The commands about who may ask, how much, and what they used."""

import argparse
from pathlib import Path
from typing import Any

from diptych_cli import teaching
from diptych_cli.bus_option import add_nats_url
from diptych_cli.failing import need

_ROLES = ("user", "viewer", "operator", "admin")


def _add_keys(commands: Any) -> None:
    keys = _parser(commands, "keys", teaching.KEYS, "who may ask")
    keys.set_defaults(run=lambda _: _help(keys))
    verbs = keys.add_subparsers(title="commands", metavar="COMMAND")
    creating = verbs.add_parser("create", help="make one, and print it this once")
    creating.add_argument("--tenant", default="default", help="whose requests it makes (default)")
    creating.add_argument("--name", default="", help="what you know it by")
    creating.add_argument("--role", choices=_ROLES, default="user", help="what it is for (user)")
    creating.add_argument("--expires", metavar="TIME", help="in how long: 12h, 90d (never)")
    _add_limits(creating)
    creating.add_argument("--json", action="store_true", help="one line of JSON")
    listing = verbs.add_parser("list", help="all of them, the newest last")
    listing.add_argument("--tenant", help="only this one's")
    listing.add_argument("--json", action="store_true", help="one line of JSON")
    showing = verbs.add_parser("show", help="everything about one, as JSON")
    showing.add_argument("id", help="as the list shows it, or its beginning; or the key itself")
    showing.add_argument("--json", action="store_true", help="as always")
    revoking = verbs.add_parser("revoke", help="have it count no more")
    revoking.add_argument("id", nargs="+", help="as above")
    revoking.add_argument("--forget", action="store_true", help="keep no record of it either")
    for verb in (creating, listing, showing, revoking):
        _add_where(verb)
    creating.set_defaults(run=_run_create)
    listing.set_defaults(run=lambda o: _keys().show_all(_url(o), tenant=o.tenant, as_json=o.json))
    showing.set_defaults(run=lambda o: _keys().show_one(_url(o), o.id))
    revoking.set_defaults(run=lambda o: _keys().revoke(_url(o), o.id, forget=o.forget))


def _add_tenants(commands: Any) -> None:
    tenants = _parser(commands, "tenants", teaching.TENANTS, "whose keys, and how much")
    tenants.set_defaults(run=lambda _: _help(tenants))
    verbs = tenants.add_subparsers(title="commands", metavar="COMMAND")
    listing = verbs.add_parser("list", help="all of them")
    listing.add_argument("--json", action="store_true", help="one line of JSON")
    limiting = verbs.add_parser("limit", help="what all its keys may take together")
    limiting.add_argument("tenant")
    _add_limits(limiting)
    purging = verbs.add_parser("purge", help="delete all its data, and its keys")
    purging.add_argument("tenant")
    purging.add_argument("--yes", action="store_true", help="do it; without, it is only counted")
    purging.add_argument("--keep-usage", action="store_true", help="keep the books, for a bill")
    purging.add_argument("--json", action="store_true", help="one line of JSON")
    for verb in (listing, limiting, purging):
        _add_where(verb)
    tenants_module = "diptych_cli.tenants"
    listing.set_defaults(run=lambda o: need(tenants_module).show_all(_url(o), as_json=o.json))
    limiting.set_defaults(run=lambda o: need(tenants_module).limit(_url(o), o.tenant, _limits(o)))
    purging.set_defaults(run=_run_purge)


def _add_usage(commands: Any) -> None:
    usage = _parser(commands, "usage", teaching.USAGE, "what tenants used")
    usage.add_argument("--tenant", help="only this one's")
    usage.add_argument("--since", metavar="DAY", help="from this day on: 2026-01-31 (all)")
    usage.add_argument("--json", action="store_true", help="one line of JSON")
    _add_where(usage)
    usage.set_defaults(
        run=lambda o: need("diptych_cli.usage").usage(
            _url(o), tenant=o.tenant, since=o.since, as_json=o.json
        )
    )


def _add_audit(commands: Any) -> None:
    audit = _parser(commands, "audit", teaching.AUDIT, "who did what")
    audit.add_argument("--actor", default="", metavar="TEXT", help="only of those named so")
    audit.add_argument("--action", default="", help="only this: keys, or keys.create (all)")
    audit.add_argument("--object", default="", metavar="TEXT", help="only done to what has this")
    audit.add_argument("--since", metavar="TIME", help="how far back: 12h, 7d (all, 400 days)")
    audit.add_argument("--json", action="store_true", help="one line of JSON")
    _add_where(audit)
    audit.set_defaults(
        run=lambda o: need("diptych_cli.audit").audit(
            _url(o),
            actor=o.actor,
            action=o.action,
            object_name=o.object,
            since=o.since,
            as_json=o.json,
        )
    )


ADDED = (_add_keys, _add_tenants, _add_usage, _add_audit)


def _run_purge(options: argparse.Namespace) -> int:
    tenants = need("diptych_cli.tenants")
    wanted = tenants.Purging(tenant=options.tenant, sure=options.yes, keep_usage=options.keep_usage)
    return int(tenants.purge(_url(options), wanted, as_json=options.json))


def _run_create(options: argparse.Namespace) -> int:
    keys = _keys()
    identities, contracts = need("diptych_cli.identities"), need("diptych_contracts.keys")
    wanted = keys.Wanted(
        tenant=options.tenant,
        name=options.name,
        role=contracts.Role(options.role),
        expires_s=identities.span_s(options.expires) if options.expires else None,
        limits=_limits(options),
    )
    return int(keys.create(_url(options), wanted, as_json=options.json))


def _keys() -> Any:
    return need("diptych_cli.keys")


def _limits(options: argparse.Namespace) -> Any:
    return need("diptych_contracts.keys").RateLimits(
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        concurrency=options.concurrency,
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests-per-minute", type=_count, metavar="N", help="(no limit)")
    parser.add_argument(
        "--tokens-per-minute", type=_count, metavar="N", help="of prompts and answers (no limit)"
    )
    parser.add_argument("--concurrency", type=_count, metavar="N", help="at once (no limit)")


def _url(options: argparse.Namespace) -> str:
    """The bus that holds the keys."""
    url = options.nats_url or need("diptych_cli.presence").find(options.port, options.dir).nats_url
    return str(url)


def _add_where(parser: argparse.ArgumentParser) -> None:
    add_nats_url(parser)
    parser.add_argument("--port", type=_count, help="of the stack (the only one that runs)")
    parser.add_argument("--dir", type=Path, help="of the stack, if it was started with --dir")


def _parser(commands: Any, name: str, about: str, short: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(
        name, description=about, help=short, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    return made


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)
