"""`diptych chat` against a server that says what it is told to."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from diptych_cli import chat
from diptych_cli.answers import Event, PathTaken, Taken, Usage, events, summary
from diptych_cli.asking import Server
from diptych_cli.failing import CliError

OPTIONS = chat.ChatOptions(model=None, system="Be kind.", temperature=0.0, max_tokens=None)
MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


def chunk(text: str | None = None, **others: Any) -> str:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    return f"data: {json.dumps({'choices': choices, 'usage': None, **others})}\n\n"


class Scripted:
    """A server and what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send(200, json.dumps(MODELS))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append(json.loads(body))
                outer.keys.append(self.headers["Authorization"])
                self._send(*outer.answers.pop(0))

            def _send(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        self.server = Server(f"http://127.0.0.1:{self._http.server_port}/v1", "secret")

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


def test_one_question_is_one_answer(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    usage = chunk(usage={"completion_tokens": 2})
    scripted.answers = [(200, chunk("Hi, ") + chunk("you\x1b[2J") + usage + "data: [DONE]\n\n")]
    assert chat.chat(scripted.server, OPTIONS, "Hi?") == 0
    out, err = capsys.readouterr()
    assert out == "Hi, you[2J\n"
    assert "2 tokens" in err
    (asked,) = scripted.asked
    assert asked["model"] == "m"
    assert asked["temperature"] == 0.0
    assert "max_tokens" not in asked
    assert asked["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi?"},
    ]
    assert scripted.keys == ["Bearer secret"]


def test_turns_remember_one_another_and_a_failed_one_is_forgotten(scripted: Scripted) -> None:
    refusal = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})
    failed = chunk("par") + chunk(error={"message": "the workers left"})
    scripted.answers = [
        (200, chunk("One.")),
        (400, refusal),
        (200, failed),
        (200, chunk("Two.")),
        (200, chunk("New.")),
    ]
    talk = chat.Conversation(scripted.server, "m", OPTIONS)
    assert talk.ask("1").text == "One."
    with pytest.raises(CliError, match="too long"):
        talk.ask("2")
    with pytest.raises(CliError, match="the workers left"):
        talk.ask("3")
    talk.ask("4")
    assert [turn["content"] for turn in scripted.asked[-1]["messages"]] == [
        "Be kind.",
        "1",
        "One.",
        "4",
    ]
    talk.restart()
    talk.ask("5")
    assert [turn["content"] for turn in scripted.asked[-1]["messages"]] == ["Be kind.", "5"]


def test_ctrl_c_keeps_what_came(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted.answers = [(200, chunk("a") + chunk("b")), (200, chunk("c"))]
    real = chat._print

    def interrupted(text: str) -> None:
        real(text)
        if text == "a":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "_print", interrupted)
    talk = chat.Conversation(scripted.server, "m", OPTIONS)
    assert talk.ask("1").finish_reason == "stopped"
    talk.ask("2")
    assert scripted.asked[-1]["messages"][2] == {"role": "assistant", "content": "a"}


def test_what_is_no_event_is_told(scripted: Scripted) -> None:
    scripted.answers = [(200, "data: <html>\n\n"), (502, "<html>")]
    talk = chat.Conversation(scripted.server, "m", OPTIONS)
    with pytest.raises(CliError, match="something that is no event"):
        talk.ask("1")
    with pytest.raises(CliError, match="the server refuses with status 502"):
        talk.ask("1")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1 does not answer: Connection refused"),
        ("127.0.0.1:8080", "expected a URL like"),
        ("http://h:port/v1", "is no URL"),
    ],
)
def test_a_server_that_cannot_be_asked_is_told(url: str, says: str) -> None:
    with pytest.raises(CliError, match=says):
        Server(url).models()


def test_events_pass_over_comments_and_ids_and_end_at_the_mark() -> None:
    lines = [b": hello\n", b"id: 1\n", b'data: {"choices": []}\n', b"data: [DONE]\n", b"data: x\n"]
    assert list(events(lines)) == [Event()]


def test_the_summary_says_where_it_ran_and_what_it_took() -> None:
    path = PathTaken(
        mode="remote", prefill_worker="p-1", decode_worker="d-1", link="shm", ttft_ms=85.2
    )
    path.joules.total = 12.34
    path.energy_source = "sim"
    usage = Usage(completion_tokens=41, diptych=path)
    assert summary(usage, Taken(0.2, 2.0), "stop") == (
        "remote · p-1 → d-1 over shm · first token 85 ms · 20.0 tokens/s · 41 tokens · 12.3 J (sim)"
    )


def test_the_summary_of_another_server_says_what_is_known() -> None:
    assert summary(None, Taken(0.25, 1.0), "length") == "first token 250 ms · cut at its longest"


def test_a_second_attempt_is_told() -> None:
    path = PathTaken(mode="local", decode_worker="d-2", attempt=2)
    assert summary(Usage(diptych=path), Taken(0, 0), "stop").startswith("local · d-2 · attempt 2 ·")
