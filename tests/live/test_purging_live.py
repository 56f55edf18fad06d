"""`diptych tenants purge` on a real server: every message of every stream is searched then."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from nats.js.errors import NotFoundError

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.markers import MARKER

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

OTHER = "marimbagranite"
KEPT = {"KV_responses", "KV_files", "KV_batches", "OBJ_file-parts"}
SERVICES = ("decode-worker", "scheduler", "gateway")


def diptych(live: LiveStack, *arguments: str) -> Any:
    command = (sys.executable, "-m", "diptych_cli", *arguments, *live.where)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def ask(live: LiveStack, path: str, key: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
    request = urllib.request.Request(f"{live.base_url}{path}", data=data, headers=sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status), json.load(answer)
    except urllib.error.HTTPError as err:
        return err.code, json.load(err)


def upload(live: LiveStack, key: str, mark: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": mark}], "max_tokens": 4}
    line = {"custom_id": mark, "method": "POST", "url": "/v1/chat/completions", "body": body}
    form = (
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--b\r\ncontent-disposition: form-data; name="file"; filename="{mark}"\r\n\r\n'
        f"{json.dumps(line)}\r\n--b--\r\n"
    )
    kind = {"content-type": "multipart/form-data; boundary=b"}
    status, told = ask(live, "/files", key, form.encode(), **kind)
    assert status == 200, told
    return str(told["id"])


def leave_traces(live: LiveStack, key: str, mark: str) -> str:
    """Ask for what is kept; gives the id of a stored response."""
    said = [{"role": "user", "content": f"{mark} " * 30}]
    chat = {"model": MODEL, "messages": said, "max_tokens": 4}
    status, told = ask(live, "/chat/completions", key, chat, **{"Idempotency-Key": mark})
    assert status == 200, told
    asked = {"model": MODEL, "input": mark, "metadata": {"a": mark}, "max_output_tokens": 4}
    status, response = ask(live, "/responses", key, asked)
    assert status == 200, response
    wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = {"input_file_id": upload(live, key, mark), "metadata": {"b": mark}, **wanted}
    status, told = ask(live, "/batches", key, batch)
    until(lambda: ask(live, f"/batches/{told['id']}", key)[1]["status"] == "completed")
    return str(response["id"])


def until(holds: Any, timeout_s: float = 240.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.1)


async def places(live: LiveStack, mark: str) -> set[str]:
    """The streams (buckets are streams too) that hold `mark`, in a message or a header."""
    client = await live.client()
    found: set[str] = set()
    try:
        stream = client.jetstream(timeout=60)
        for info in await stream.streams_info():
            name, state = str(info.config.name), info.state
            for seq in range(max(1, state.first_seq), state.last_seq + 1):
                try:
                    message = await stream.get_msg(name, seq)
                except NotFoundError:
                    continue
                if not message.data and "KV-Operation" in (message.headers or {}):
                    continue  # says only that a key is gone, and goes itself
                data = (message.data or b"") + repr((message.subject, message.headers)).encode()
                if mark.encode() in data:
                    found.add(name)
    finally:
        await client.close()
    return found


async def test_a_purged_tenant_is_found_in_no_stream_and_no_bucket(tmp_path: Path) -> None:
    live = LiveStack(tmp_path, engine="sim", patient=True)
    try:
        for service in SERVICES:
            live.start(service)
        for process in live.processes:
            process.wait_ready()
        live.wait_for_model()
        keys = {
            tenant: diptych(live, "keys", "create", "--tenant", tenant, "--json")["key"]
            for tenant in ("acme", "rival")
        }
        until(lambda: all(ask(live, "/models", key)[0] == 200 for key in keys.values()))
        leave_traces(live, keys["acme"], MARKER)
        theirs = leave_traces(live, keys["rival"], OTHER)
        async with asyncio.timeout(120):
            while not await places(live, MARKER) >= KEPT:
                await asyncio.sleep(0.2)

        done = diptych(live, "tenants", "purge", "acme", "--yes", "--json")

        assert done["unfinished"] == []
        assert done["deleted"]["keys"] == 1
        assert done["deleted"]["journal frames"] > 0
        assert await places(live, MARKER) == set()
        assert await places(live, "acme") <= {"EVENTS", "AUDIT", "KV_keys"}
        status, told = ask(live, "/models", keys["acme"])
        assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        assert await places(live, OTHER) >= {"KV_responses", "KV_files", "OBJ_file-parts"}
        assert ask(live, f"/responses/{theirs}", keys["rival"])[0] == 200
        (entry,) = diptych(live, "audit", "--action", "tenants.purge", "--json")
        assert (entry["object"], entry["outcome"]) == ("tenant:acme", "done")
    finally:
        live.close()
