"""`nanollm chat` as a process: through a terminal of its own, and with its input from a pipe."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanollm import LLM

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def command(model: Path, *flags: object) -> list[str]:
    return [sys.executable, "-m", "nanollm.cli", "chat", *map(str, (model, "--num-kv-blocks", 512, *flags))]


class Terminal:
    """A process on the other end of a terminal."""

    def __init__(self, arguments: list[str]) -> None:
        self._fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=ENV, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # which makes it the controlling one
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def read_until(self, pattern: str, seconds: float = 120.0) -> str:
        """What was shown up to there, and not read before."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self.shown += os.read(self._fd, 4096).decode().replace("\r\n", "\n")
        read, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return read

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(smollm2_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(command(smollm2_path, "--temperature", 0))
    terminal.read_until("Ctrl-D leaves.\n>>> ")
    yield terminal
    terminal.close()


def test_a_conversation_in_a_terminal(terminal: Terminal) -> None:
    terminal.type("What is the capital of France?\n")
    assert "The capital of France is Paris." in terminal.read_until(">>> ")
    terminal.type("/stats\n")
    stats = terminal.read_until(">>> ")
    assert re.search(r"TTFT \d\.\d+ s, 8 tokens, .* tokens/s; context: 45 of 8192 tokens", stats)
    terminal.type("What did I ask you about?\n")  # which only the history tells
    assert "France" in terminal.read_until("\n>>> ")
    terminal.type("/reset\n")
    terminal.read_until(">>> ")
    terminal.type("What is the capital of France?\n")
    terminal.read_until("Paris.*\n>>> ")
    terminal.type("/stats\n")
    assert re.search(r"context: 45 of 8192 tokens, of which 32 came from the prefix", terminal.read_until(">>> "))
    terminal.type("/nonsense\n")
    assert "There is no command /nonsense: /help lists them." in terminal.read_until(">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(30) == 0


def test_ctrl_c_stops_the_answer_and_only_that(terminal: Terminal) -> None:
    terminal.type("Count from 1 to 1000, one number a line.\n")
    terminal.read_until(r"\w+.*\n[\s\S]*\w+ ")  # the echo, then some of the answer
    terminal.type("\x03")
    terminal.read_until("\n>>> ", 10.0)
    terminal.type("/stats\n")
    found = re.search(r"s, (\d+) tokens", terminal.read_until(">>> "))
    assert found and 0 < int(found[1]) < 400  # it would say more than 400
    time.sleep(0.5)  # Python misses a Ctrl-C between the prompt and its waiting for input
    terminal.type("\x03")
    terminal.read_until("Ctrl-D leaves.\n>>> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(30) == 0


def test_questions_from_a_pipe(smollm2_path: Path) -> None:
    question = "What is the capital of France?"
    lines = (
        f"{question}\n/stats\n/system Be a pirate.\n\n/help\n/reset\n{question}\n/stats"  # without a newline at the end
    )
    arguments = command(smollm2_path, "--temperature", 0, "--max-tokens", 8)
    result = subprocess.run(arguments, input=lines, capture_output=True, text=True, env=ENV, timeout=120)
    assert result.returncode == 0, result.stderr
    shown = result.stdout.splitlines()
    assert shown[0] == "The capital of France is Paris."
    assert any(line.startswith("/reset ") for line in shown) and ">>>" not in result.stdout
    prompts = [int(line.split("context: ")[1].split()[0]) - 8 for line in (shown[1], shown[-1])]
    with LLM(str(smollm2_path), num_kv_blocks=8) as llm:
        messages = [{"role": "user", "content": question}]
        systems = [], [{"role": "system", "content": "Be a pirate."}]
        texts = [llm.apply_chat_template([*system, *messages]) for system in systems]
        assert prompts == [len(llm.tokenizer.encode(text)) for text in texts]  # type: ignore[union-attr]


def test_a_conversation_that_outgrew_the_context_can_go_on(smollm2_path: Path) -> None:
    lines = f"{'word ' * 100}\n/reset\nWhat is the capital of France?\n"
    arguments = command(smollm2_path, "--temperature", 0, "--max-model-len", 64)
    result = subprocess.run(arguments, input=lines, capture_output=True, text=True, env=ENV, timeout=120)
    assert result.returncode == 1  # a question was lost
    assert "/reset forgets the conversation" in result.stderr
    assert result.stdout.splitlines()[-1] == "The capital of France is Paris."


def test_a_model_without_a_chat_template_is_refused() -> None:
    flags = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 1, "vocab_size": 1000}')
    arguments = command(Path("qwen3-0.6b"), *flags)
    result = subprocess.run(arguments, input="hi\n", capture_output=True, text=True, env=ENV, timeout=120)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: chat needs a tokenizer")


def test_a_closed_input_is_refused(smollm2_path: Path) -> None:
    arguments = command(smollm2_path)
    result = subprocess.run(
        arguments, preexec_fn=lambda: os.close(0), capture_output=True, text=True, env=ENV, timeout=60
    )
    assert result.returncode == 2
    assert "chat reads lines from its standard input, which is closed" in result.stderr
