"""What was done to the fleet, its keys and its tenants, and by whom: stream `AUDIT`.

An action is written down before it is tried (`asked`) and once more with its outcome, both under
one id: an actor that dies between the two leaves a trace too. Never a secret, never a prompt.
"""

from enum import StrEnum

from diptych_contracts.wire import Message


class Action(StrEnum):
    """What is audited. `policy.access` says which right each takes."""

    KEYS_READ = "keys.read"
    KEYS_CREATE = "keys.create"
    KEYS_REVOKE = "keys.revoke"
    KEYS_FORGET = "keys.forget"
    TENANTS_READ = "tenants.read"
    TENANTS_LIMIT = "tenants.limit"
    TENANTS_PURGE = "tenants.purge"
    USAGE_READ = "usage.read"
    AUDIT_READ = "audit.read"
    DEAD_PROMPT = "dead.prompt"
    """What somebody wrote was shown to an operator."""
    DEAD_RETRY = "dead.retry"
    FLEET_SCALE = "fleet.scale"


class Outcome(StrEnum):
    """How far an action came."""

    ASKED = "asked"
    """About to be tried; as the last word of an action: nobody knows."""
    DONE = "done"
    REFUSED = "refused"
    """The actor may not."""
    FAILED = "failed"


class Audited(Message, frozen=True, kw_only=True, tag="audited.1"):
    """One word about an action: `audit.<action>`, with `<audit_id>.<outcome>` as its id."""

    audit_id: str
    action: Action
    actor: str
    """`key:<key id>`, or user and host of a command: `user@host`."""
    door: str
    """`cli` or `http`."""
    object: str = ""
    """What it was done to: `key:<id>`, `tenant:<name>`, `request:<id>`, `service:<name>`."""
    outcome: Outcome
    detail: str = ""
    """What came of it, in words."""
    unix_ms: int
