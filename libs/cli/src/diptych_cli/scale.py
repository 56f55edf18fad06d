"""`diptych scale`: more or fewer processes of one service in a running stack."""

import asyncio
import sys

from diptych_cli import credentials
from diptych_cli.auditing import audited
from diptych_cli.failing import CliError
from diptych_cli.joining import joined, signing
from diptych_cli.presence import StackFile
from diptych_cli.stack import SCALABLE
from diptych_contracts import subjects
from diptych_contracts.audit import Action
from diptych_contracts.control import Scale, ScaleAnswer, ScaleDone, ScaleRefused
from diptych_contracts.errors import BusAway

PATIENCE_S = 180.0
"""Longer than any drain, and than weights take to load."""


def scale(stack: StackFile, kind: str, count: int) -> int:
    """Order it and wait until it is so.

    Raises:
        CliError: it was refused, or nobody answers.
    """
    if sys.stderr.isatty():
        hint = "waiting until all serve and whoever leaves has finished; Ctrl-C does not undo it"
        print(hint, file=sys.stderr)
    done = asyncio.run(_order(stack, Scale(service=SCALABLE[kind].service, count=count)))
    print(told(kind, done))
    return 0 if len(done.running) == count else 1


def told(kind: str, done: ScaleDone) -> str:
    """What became of an order."""
    names = f" ({', '.join(done.running)})" if done.running else ""
    given_up = f"; {done.given_up} could not start, see the stack's log" if done.given_up else ""
    return f"{kind}: {len(done.running)} running{names}{given_up}"


async def _order(stack: StackFile, order: Scale) -> ScaleDone:
    subject, service = subjects.control(stack.supervisor), f"service:{order.service}"
    me = credentials.access(stack.nats_url)
    async with (
        joined(stack.nats_url, me) as bus,
        audited(bus, Action.FLEET_SCALE, service) as doing,
    ):
        doing.detail = f"to {order.count}"
        signed = signing(bus, me)(subject, order)
        try:
            answer: ScaleAnswer = await bus.request(
                subject, signed, ScaleAnswer, timeout_s=PATIENCE_S
            )
        except BusAway as err:
            raise CliError(
                f"no answer from the stack's supervisor ({err}); diptych top shows who is there"
            ) from err
        if isinstance(answer, ScaleRefused):
            raise CliError(answer.reason)
        doing.detail = f"to {order.count}: {len(answer.running)} running"
        return answer
