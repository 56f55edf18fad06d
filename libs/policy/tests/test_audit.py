from diptych_contracts.audit import Action, Audited, Outcome
from diptych_policy.audit import about, folded


def word(audit_id: str, outcome: Outcome, **changes: object) -> Audited:
    given = {"action": Action.KEYS_CREATE, "actor": "ann@desk", "door": "cli", "unix_ms": 10}
    return Audited(audit_id=audit_id, outcome=outcome, **{**given, **changes})


def test_an_action_is_told_once_with_its_end_in_whatever_order_it_comes() -> None:
    asked, done = word("a", Outcome.ASKED), word("a", Outcome.DONE, detail="dk-1")
    lost = word("b", Outcome.ASKED)
    assert folded([asked, lost, done]) == [done, lost]
    assert folded([done, asked]) == [done]


def test_what_it_is_asked_about() -> None:
    first = word("a", Outcome.DONE, object="tenant:acme")
    second = word("b", Outcome.FAILED, action=Action.TENANTS_PURGE, actor="key:k1", unix_ms=20)
    both = [first, second]
    assert about(both) == both
    assert about(both, actor="key:") == [second]
    assert about(both, action="keys") == about(both, action="keys.create") == [first]
    assert about(both, action="key") == []
    assert about(both, object_name="acme") == [first]
    assert about(both, since_unix_ms=11) == [second]
