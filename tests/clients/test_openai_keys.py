"""401 and 403 of the stock client, at a gateway with keys; it needs neither worker nor model."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus

from diptych_testkit.live_stack import LiveStack

pytestmark = pytest.mark.clients

KNOWN_WITHIN_S = 120.0
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveStack, dict[str, str]]]:
    """A gateway, and the keys of a user and a viewer."""
    live = LiveStack(tmp_path_factory.mktemp("keyed"), engine="sim", patient=True)
    try:
        live.start("gateway").wait_ready()
        keys = {role: _key(live, role) for role in ("user", "viewer")}
        with client_of(live, keys["user"]) as client:
            _until_known(client)
        yield live, keys
    finally:
        live.close()


def _key(live: LiveStack, role: str) -> str:
    command = ("-m", "diptych_cli", "keys", "create", "--role", role, "--json")
    done = subprocess.run(
        [sys.executable, *command, *live.where],
        capture_output=True,
        check=True,
        timeout=120,
    )
    return str(json.loads(done.stdout)["key"])


def _until_known(client: openai.OpenAI) -> None:
    give_up_s = time.monotonic() + KNOWN_WITHIN_S
    while True:
        try:
            client.models.list()
        except openai.AuthenticationError:
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        else:
            return


def client_of(live: LiveStack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.base_url, api_key=key, max_retries=0)


def test_401_a_key_that_is_none(keyed: tuple[LiveStack, dict[str, str]]) -> None:
    live, _ = keyed
    with client_of(live, "nobodys") as client:
        with pytest.raises(openai.AuthenticationError) as seen:
            client.chat.completions.create(model="any", messages=HELLO)
        assert (seen.value.status_code, seen.value.code) == (401, "invalid_api_key")
        assert seen.value.type == "authentication_error"
        with pytest.raises(InvalidStatus) as refused, client.responses.connect():
            pass
    answer = refused.value.response
    assert answer.status_code == 401
    assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"
    assert answer.headers["x-request-id"]


def test_403_a_key_without_the_right(keyed: tuple[LiveStack, dict[str, str]]) -> None:
    live, keys = keyed
    with (
        client_of(live, keys["viewer"]) as client,
        pytest.raises(openai.PermissionDeniedError) as seen,
    ):
        client.chat.completions.create(model="any", messages=HELLO)
    assert (seen.value.status_code, seen.value.code) == (403, "forbidden")
    assert seen.value.type == "permission_error"


def test_a_good_key_gets_past_the_door(keyed: tuple[LiveStack, dict[str, str]]) -> None:
    live, keys = keyed
    with client_of(live, keys["user"]) as client, pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="any", messages=HELLO)
