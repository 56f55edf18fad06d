"""A real vLLM on the CPU, with its NIXL connector: whoever has one says where its command is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from diptych_testkit.ports import free_port
from diptych_testkit.tiny_llama import CONTEXT_TOKENS

COMMAND = "DIPTYCH_VLLM"
"""The variable that says where it is: `.../bin/vllm`."""
READY_S = 600.0
_STOP_S = 20.0
_BLOCK_TOKENS = 32
"""The smallest that its attention on CPUs takes."""
_WHOLE_PROMPTS = 65_536
"""Tokens of one step: no prompt is cut, for which a seeded one ends vLLM 0.32 on a CPU."""


class VllmServer:
    """One server on loopback that serves `model`, with all its processes."""

    def __init__(self, folder: Path, command: str, model: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self._command, self._model = folder, command, model
        self.port, self._side_channel, self._events, self._replay = (free_port() for _ in range(4))
        self.log = folder / "vllm.log"
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of HTTP."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> dict[str, str]:
        """Those of the worker in front of it."""
        options = self.folder / "vllm.toml"
        options.write_text(
            f'kv_events = "tcp://127.0.0.1:{self._events}"\n'
            f'kv_replay = "tcp://127.0.0.1:{self._replay}"\n'
        )
        told = {"ENGINE": "vllm", "ENGINE_URL": self.url, "ENGINE_OPTIONS": str(options)}
        return told | {"MODEL_PATH": str(self._model)}

    def start(self) -> "VllmServer":
        """Start it; it is not ready yet."""
        connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events}",  # it binds to nothing else
            "replay_endpoint": f"tcp://127.0.0.1:{self._replay}",
        }
        command = [
            *(sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--"),
            *(self._command, "serve", str(self._model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"),
            *("--block-size", str(_BLOCK_TOKENS), "--max-model-len", str(CONTEXT_TOKENS)),
            *("--max-num-seqs", "16", "--max-num-batched-tokens", str(_WHOLE_PROMPTS)),
            *("--enable-prompt-tokens-details", "--enable-scale-out"),
            *("--kv-transfer-config", json.dumps(connector | {"kv_buffer_device": "cpu"})),
            *("--kv-events-config", json.dumps(events)),
        ]
        environment = os.environ | {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_channel),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONPATH", None)
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def wait_ready(self) -> None:
        """Wait until it answers; an early death shows its last words."""
        give_up_s = time.monotonic() + READY_S
        while not self._answers():
            assert self._popen is not None
            if self._popen.poll() is not None or time.monotonic() > give_up_s:
                words = self.log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"vLLM is not ready: {words}")
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False

    def total(self, name: str, label: str = "") -> float:
        """The sum of its metric `name`, of the lines that have `label`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def kill(self) -> None:
        """SIGKILL for all its processes, as when its container dies."""
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(_STOP_S)

    def stop(self) -> None:
        """SIGTERM, SIGKILL if that does not help. Nothing is left running."""
        if self._popen is None:
            return
        self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_STOP_S)
        self.kill()
