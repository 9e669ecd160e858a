"""`nanollm serve` as a process of its own, as its tests and a soak by hand use it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx
import psutil

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).parent.parent.parent


class ServerProcess:
    """Starts a server on a free port and waits until it serves; `with` ends it."""

    def __init__(self, model: object, *flags: object, name: str = "m", **environment: str) -> None:
        command = [
            sys.executable,
            "-m",
            "nanollm.cli",
            "serve",
            model,
            "--port",
            0,
            "--served-model-name",
            name,
            *flags,
        ]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*map(str, command)], stderr=subprocess.PIPE, text=True, env=env | environment, cwd=ROOT
        )
        self.name, self.log = name, ""
        self._has_said = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._has_said.wait(120) or not (found := re.search(r"on (http://127\.0\.0\.1:(\d+))", self.log)):
            self.process.kill()
            raise AssertionError(f"the server did not start:\n{self.log}")
        self.url, self.port = found[1], int(found[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if line.startswith("serving "):
                self._has_said.set()
        self._has_said.set()

    def client(self) -> "openai.OpenAI":
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def async_client(self) -> "openai.AsyncOpenAI":
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, path: str, body: Any, **settings: Any) -> httpx.Response:
        """JSON, or bytes as they are."""
        what = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(self.url + path, timeout=60, **what, **settings)  # type: ignore[arg-type]

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10, **settings)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the metric's samples that have these labels."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            sample = re.fullmatch(rf"nanollm:{name}{{(.*)}} (\S+)", line)
            if sample and all(f'{label}="{value}"' in sample[1] for label, value in labels.items()):
                total += float(sample[2])
        return total

    def is_idle(self, seconds: float = 10.0) -> bool:
        """Whether the engine comes to have no request and all blocks free."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
            if not any(self.metric(name) for name in names):
                return True
            time.sleep(0.05)
        return False

    def engine(self) -> psutil.Process:
        """The engine process."""
        (found,) = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if any("engine_main" in part for part in child.cmdline())
        ]
        return found

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
