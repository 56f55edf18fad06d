import json
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from diptych_identity import claims, identity, tokens
from diptych_identity.authority import Authority
from diptych_identity.claims import Permissions, Scope
from diptych_identity.identity import BadIdentity
from diptych_identity.issuing import Issuer
from diptych_identity.nkeys import KeyPair, Kind
from diptych_identity.roles import Role
from diptych_identity.trust import NotTrusted, Trust

TABLE = {role: Permissions(("a.{{name()}}",), ()) for role in Role}
WORKER = Role.DECODE_WORKER
NOW_S = 1_800_000_000


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "certs", TABLE)


@pytest.fixture
def trust(authority: Authority) -> Trust:
    return Trust(authority.trust)


def test_a_process_is_believed_what_it_signed(authority: Authority, trust: Trust) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    trust.verify("decode-worker-1", WORKER, me.jwt, me.sign(b"order"), b"order")


def test_nobody_speaks_for_another(authority: Authority, trust: Trust) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    other = authority.issuer(WORKER).issue("decode-worker-2")
    with pytest.raises(NotTrusted, match="did not sign"):
        trust.verify("decode-worker-2", WORKER, other.jwt, me.sign(b"order"), b"order")
    with pytest.raises(NotTrusted, match="expected the word of decode-worker-2"):
        trust.verify("decode-worker-2", WORKER, me.jwt, me.sign(b"order"), b"order")
    with pytest.raises(NotTrusted, match="did not sign"):
        trust.verify("decode-worker-1", WORKER, me.jwt, me.sign(b"order"), b"another")


def test_a_role_is_the_signing_key_s_not_the_name_s(authority: Authority, trust: Trust) -> None:
    me = authority.issuer(WORKER).issue("power-governor-1")
    with pytest.raises(NotTrusted, match="not known as a power-governor"):
        trust.verify("power-governor-1", Role.POWER_GOVERNOR, me.jwt, me.sign(b"x"), b"x")


def test_another_stack_s_identity_is_not_believed(tmp_path: Path, trust: Trust) -> None:
    other = Authority.make(tmp_path / "other", TABLE)
    me = other.issuer(WORKER).issue("decode-worker-1")
    with pytest.raises(NotTrusted, match="not known"):
        trust.verify("decode-worker-1", WORKER, me.jwt, me.sign(b"x"), b"x")


def test_a_token_that_was_altered_is_none(authority: Authority, trust: Trust) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    head, _, signature = me.jwt.split(".")
    body = authority.issuer(WORKER).issue("decode-worker-9").jwt.split(".")[1]
    with pytest.raises(NotTrusted):
        trust.verify("decode-worker-9", WORKER, f"{head}.{body}.{signature}", me.sign(b"x"), b"x")


def test_a_token_that_is_too_long_is_none(authority: Authority) -> None:
    key = authority.issuer(WORKER).key
    name = "a" * tokens.MAX_TOKEN_BYTES
    with pytest.raises(tokens.BadToken, match="at most"):
        tokens.read(tokens.signed(key.public, name, {}, by=key, issued_unix_s=NOW_S))


@pytest.mark.parametrize("text", ["", "a.b.c", "..", "e30.e30.e30", "\0" * 50, "a" * 2_000_000])
def test_hostile_tokens_are_refused(trust: Trust, text: str) -> None:
    with pytest.raises(tokens.BadToken):
        tokens.read(text)
    with pytest.raises(NotTrusted):
        trust.verify("x", WORKER, text, b"", b"")


def test_an_expired_identity_is_not_believed(authority: Authority) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1", ttl_s=60)
    later = Trust(authority.trust, unix_s=lambda: me.expires_unix_s + 31)
    with pytest.raises(NotTrusted, match="expired"):
        later.verify("decode-worker-1", WORKER, me.jwt, me.sign(b"x"), b"x")


def test_a_revoked_one_is_not_believed_at_once_even_if_renewed(
    authority: Authority, trust: Trust
) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    trust.verify("decode-worker-1", WORKER, me.jwt, me.sign(b"x"), b"x")
    authority.revoke_identity(me)
    for one in (me, authority.issuer(WORKER).renew(me)):
        with pytest.raises(NotTrusted, match="revoked"):
            trust.verify("decode-worker-1", WORKER, one.jwt, one.sign(b"x"), b"x")


@pytest.mark.parametrize("told", [{"type": "account"}, {"issuer_account": "another"}])
def test_what_a_role_s_key_signed_is_an_identity_of_this_account_or_nothing(
    authority: Authority, trust: Trust, told: dict[str, str]
) -> None:
    issuer, key = authority.issuer(WORKER), KeyPair.new(Kind.USER)
    nats = claims.user(issuer.account) | told
    jwt = tokens.signed(key.public, "decode-worker-1", nats, by=issuer.key, issued_unix_s=NOW_S)
    signature = key.sign(identity.signed_part(b"x"))
    with pytest.raises(NotTrusted):
        trust.verify("decode-worker-1", WORKER, jwt, signature, b"x")


@pytest.mark.parametrize("named", ["its own", "*"])
def test_revoked_is_what_was_issued_up_to_that_second(authority: Authority, named: str) -> None:
    issuer = Issuer(authority.issuer(WORKER).account, authority.issuer(WORKER).key, lambda: NOW_S)
    before = issuer.issue("decode-worker-1", ttl_s=60)
    after = replace(issuer, unix_s=lambda: NOW_S + 1).renew(before, ttl_s=60)
    key = before.key.public if named == "its own" else named
    (authority.path / "revoked.json").write_text(json.dumps({key: NOW_S}))
    authority.write()
    trust = Trust(authority.trust, unix_s=lambda: NOW_S)
    with pytest.raises(NotTrusted, match="revoked"):
        trust.verify(before.name, WORKER, before.jwt, before.sign(b"x"), b"x")
    trust.verify(after.name, WORKER, after.jwt, after.sign(b"x"), b"x")


def test_the_bus_is_reached_by_the_newest_tls_alone(trust: Trust) -> None:
    context = trust.tls()
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_a_token_of_another_algorithm_is_none(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_ALGORITHM", "none")
    me = authority.issuer(WORKER).issue("decode-worker-1")
    monkeypatch.undo()
    with pytest.raises(tokens.BadToken):
        tokens.read(me.jwt)


def test_an_account_gives_nobody_what_no_role_says() -> None:
    nothing, role = {"deny": [">"]}, Scope(WORKER, "A1", Permissions((), ()))
    told = claims.account([role], revoked={})
    assert told["default_permissions"] == {"pub": nothing, "sub": nothing}
    (key,) = told["signing_keys"]
    assert (key["template"]["pub"], key["template"]["sub"]) == (nothing, nothing)


def test_the_authority_signs_servers_and_no_other_authority(authority: Authority) -> None:
    certificate = x509.load_pem_x509_certificate((authority.path / "ca.pem").read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (found.ca, found.path_length) == (True, 0)


def test_a_rotated_key_s_identities_are_believed_until_it_is_retired(
    authority: Authority, trust: Trust
) -> None:
    before = authority.issuer(WORKER).issue("decode-worker-1")
    authority.rotate(WORKER)
    after = authority.issuer(WORKER).issue("decode-worker-2")
    for one in (before, after):
        trust.verify(one.name, WORKER, one.jwt, one.sign(b"x"), b"x")
    authority.retire(WORKER)
    trust.verify(after.name, WORKER, after.jwt, after.sign(b"x"), b"x")
    with pytest.raises(NotTrusted, match="not known"):
        trust.verify(before.name, WORKER, before.jwt, before.sign(b"x"), b"x")


def test_a_server_s_challenge_cannot_become_an_order(authority: Authority, trust: Trust) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    order = identity.signed_part(b"order")
    with pytest.raises(BadIdentity, match="not its to ask for"):
        me.answer(order.decode())
    with pytest.raises(NotTrusted):
        trust.verify(me.name, WORKER, me.jwt, me.answer("order"), b"order")


def test_a_file_gives_the_identity_again(authority: Authority, tmp_path: Path) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    path = tmp_path / "me.creds"
    path.write_text(me.text())
    path.chmod(0o600)
    again = identity.read(path)
    assert (again.name, again.jwt, again.key.seed) == (me.name, me.jwt, me.key.seed)


def test_a_file_that_others_may_read_is_refused(authority: Authority, tmp_path: Path) -> None:
    path = tmp_path / "me.creds"
    path.write_text(authority.issuer(WORKER).issue("decode-worker-1").text())
    path.chmod(0o640)
    with pytest.raises(BadIdentity, match="can be read by others"):
        identity.read(path)


def test_a_token_about_another_key_is_no_identity(authority: Authority) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    with pytest.raises(BadIdentity, match="not about this key"):
        identity.Identity.of(me.jwt, KeyPair.new(Kind.USER))


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a" * 129, "a\n"])
def test_a_name_that_is_no_subject_token_is_not_issued(authority: Authority, name: str) -> None:
    with pytest.raises(BadIdentity, match="expected a name"):
        authority.issuer(WORKER).issue(name)


def test_the_folder_is_its_owner_s_only(authority: Authority) -> None:
    public = {"ca.pem", "trust.pem"}
    for path in (authority.path, *authority.path.rglob("*")):
        mode = path.stat().st_mode & 0o777
        assert mode == (0o700 if path.is_dir() else 0o644 if path.name in public else 0o600), path


def test_opened_again_it_keeps_its_keys(authority: Authority) -> None:
    me = authority.issuer(WORKER).issue("decode-worker-1")
    Authority.opened(authority.path, TABLE)
    Trust(authority.trust).verify(me.name, WORKER, me.jwt, me.sign(b"x"), b"x")


@pytest.mark.parametrize("text", ["", "AAAA\nSAAA", "one line"])
def test_what_is_no_signing_key_is_refused(text: str) -> None:
    with pytest.raises(BadIdentity):
        Issuer.of_text(text)
