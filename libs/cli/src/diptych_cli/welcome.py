"""What the user reads once the stack serves: where, and commands that work as they stand."""

import json
import shlex
import shutil
from pathlib import Path

from diptych_cli import stack

# Without a system message SmolLM2 takes its own default one, and answers in French.
_MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]


def text(plan: stack.Plan, took_s: float) -> str:
    """The address, a request to paste, and how to stop."""
    return "\n".join(
        (
            "",
            f"Diptych serves {plan.model} at {plan.base_url} (ready in {took_s:.1f} s). Try:",
            "",
            f"  {curl(plan)}",
            "",
            f"In another terminal: {command()} chat (or top, or scale decode 2); or a decode",
            "worker of your own (kill one: the answer goes on):",
            "",
            f"  {another_worker(plan)}",
            "",
            "Stop with Ctrl-C.",
            "",
        )
    )


def command() -> str:
    """How `diptych` is typed here: by its path, unless the shell finds this very one."""
    beside = Path(stack.python()).parent / "diptych"
    found = shutil.which("diptych")
    known = found is not None and Path(found).absolute() == beside.absolute()
    return "diptych" if known or not beside.exists() else shlex.quote(str(beside))


def curl(plan: stack.Plan) -> str:
    """A streamed question."""
    body = {
        "model": plan.model,
        "stream": True,
        "temperature": 0,
        "messages": _MESSAGES,
    }
    return (
        f"curl -N {shlex.quote(plan.base_url + '/chat/completions')} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def another_worker(plan: stack.Plan) -> str:
    """How to start a worker that joins this stack."""
    service = "decode-worker"
    shared = {"NATS_URL": plan.nats_url, "TRUST": str(plan.trust), "LOG_FORMAT": "text"}
    environment = stack.variables("all", shared)
    environment |= stack.variables(service, stack.worker_settings(plan))
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    issued = f'"$({command()} certs issue {service} --keys {shlex.quote(str(plan.trust.parent))})"'
    (identity,) = stack.variables(service, {"IDENTITY": ""})
    settings = f"{identity}={issued} {settings}"
    return f"{settings} {shlex.quote(stack.python())} -m {stack.package(service)}"
