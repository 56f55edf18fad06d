import asyncio
import sys

from diptych_cli import children
from diptych_cli.stack import ChildSpec


def spec(script: str, **environment: str) -> ChildSpec:
    return ChildSpec("child", (sys.executable, "-c", script), environment)


async def lived(child: children.Child) -> tuple[int, list[bytes]]:
    seen: list[bytes] = []
    code = await child.attend(lambda _, line: seen.append(line))
    return code, seen


async def test_both_outputs_are_one_log() -> None:
    script = (
        "import os, sys; print(os.environ['WHO'], flush=True); sys.stderr.write('bad'); exit(3)"
    )
    assert await lived(await children.start("child", spec(script, WHO="me"))) == (
        3,
        [b"me", b"bad"],
    )


async def test_terminated_is_told_by_the_signal() -> None:
    child = await children.start(
        "child", spec("print('up', flush=True); import time; time.sleep(60)")
    )
    code, seen = await child.attend(lambda _, __: child.terminate()), None
    assert (code, seen) == (-15, None)
    child.kill()  # gone already: nothing happens


async def test_a_child_has_a_session_of_its_own() -> None:
    script = "import os; print(os.getsid(0) == os.getpid())"
    assert (await lived(await children.start("child", spec(script))))[1] == [b"True"]


async def test_an_endless_line_comes_in_pieces() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"a\n" + b"x" * 600_000 + b"\nlast")
    reader.feed_eof()
    got = [line async for line in children.lines(reader)]
    assert (got[0], got[-1]) == (b"a", b"last")
    assert b"".join(got[1:-1]) == b"x" * 600_000
    assert max(map(len, got)) < 400_000
