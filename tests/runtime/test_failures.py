"""Ranks that raise, die, hang or are slow: everything ends, soon and cleanly, and the error says who began."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import nanollm.llm
from nanollm import LLM, EngineDeadError, SamplingParams
from nanollm.distributed.tp_group import world_is_taken
from nanollm.layers.activation import GatedMLP
from nanollm.runtime import model_runner
from tests.conftest import random_prompt
from tests.runtime import sabotage

pytestmark = pytest.mark.timeout(90)
ROOT = Path(__file__).parents[2]
PROMPT = random_prompt(9)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def workers() -> dict[int, int]:
    """rank -> process id of what runs for us."""
    ours = [p for p in multiprocessing.active_children() if p.name.startswith("nanollm-rank")]
    return {int(p.name.removeprefix("nanollm-rank")): p.pid for p in ours if p.pid is not None}


def left_behind() -> list[str]:
    """Names in /dev/shm and the temporary directory that an engine may have made."""
    shm = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    shm = [name for name in shm if "nanollm" in name or str(os.getpid()) in name]  # others have theirs there
    files = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("nanollm-")]
    return sorted(shm + files)


_others: set[int] = set()  # processes that were there before the test, such as a server of other tests


def assert_nothing_is_left() -> None:
    assert workers() == {} and not world_is_taken()
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in _others]
    kinds = [(child.status(), " ".join(child.cmdline())) for child in children]
    # Python's own resource tracker stays as long as this process does.
    assert [kind for kind in kinds if "resource_tracker" not in kind[1]] == []
    assert all("nanollm" not in thread.name for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests' engines come and go in the machine's
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before, num_threads = left_behind(), torch.get_num_threads()
    _others.update(child.pid for child in psutil.Process().children(recursive=True))
    forward, load = GatedMLP.forward, model_runner.load_weights
    yield
    GatedMLP.forward = forward  # type: ignore[method-assign]
    model_runner.load_weights = load
    assert_nothing_is_left()
    torch.set_num_threads(num_threads)
    assert [name for name in left_behind() if name not in before] == []
    _others.clear()


@pytest.fixture
def start(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """start(size, {rank: harm}, **engine arguments) -> LLM of the tiny model."""

    def start(size: int, harms: dict[int, Callable[[], None]] | None = None, **kwargs: Any) -> LLM:
        resolve = nanollm.llm.resolve_model

        def sabotaged(*args: Any, **kwargs: Any) -> Any:
            return sabotage.SabotagedSource.of(resolve(*args, **kwargs), harms or {})

        with monkeypatch.context() as patch:
            patch.setattr(nanollm.llm, "resolve_model", sabotaged)
            return tiny("qwen3").llm(tensor_parallel_size=size, **kwargs)

    yield start
    gc.collect()


@contextlib.contextmanager
def soon(seconds: float = 5.0) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def generate(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def after(seconds: float, act: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


def test_exception_in_a_layer_of_one_rank_reaches_everybody_who_waits(start: Callable[..., LLM]) -> None:
    llm = start(3, {2: sabotage.raise_in_layer})
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            generate(llm)
        except EngineDeadError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    with soon():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert len(errors) == 3
    for error in errors:
        assert str(error).startswith("rank 2 failed:\n")
        assert "in _raise_in_layer" in str(error) and "ArithmeticError: a layer of rank 2" in str(error)
    assert_nothing_is_left()
    for _ in range(2):  # and it stays so
        with pytest.raises(EngineDeadError, match="a layer of rank 2"):
            generate(llm)
    llm.close()
    llm.close()


def test_exception_on_rank_0(start: Callable[..., LLM]) -> None:
    llm = start(2, {0: sabotage.raise_in_layer})
    with soon(), pytest.raises(EngineDeadError, match=r"(?s)^rank 0 failed:\n.*ArithmeticError: a layer of rank 0"):
        generate(llm)


def test_rank_killed_while_idle(start: Callable[..., LLM]) -> None:
    llm = start(2)
    expected = generate(llm)
    os.kill(workers()[1], signal.SIGKILL)
    time.sleep(0.5)
    with soon(), pytest.raises(EngineDeadError, match=r"^rank 1 was ended by SIGKILL"):
        generate(llm)
    with start(2) as llm:
        assert generate(llm) == expected


def test_rank_killed_during_a_step(start: Callable[..., LLM]) -> None:
    llm = start(3, {1: sabotage.hang_in_layer})
    victim = workers()[1]
    after(1.0, lambda: os.kill(victim, signal.SIGKILL))
    with soon(6.0), pytest.raises(EngineDeadError, match=r"^rank 1 was ended by SIGKILL"):
        generate(llm)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (sabotage.raise_now, "(?s)^rank 1 failed:\n.*RuntimeError: rank 1 can't load"),
        (sabotage.die_now, "^rank 1 was ended by SIGKILL"),
    ],
)
def test_failure_of_one_rank_while_loading(start: Callable[..., LLM], harm: Callable[[], None], message: str) -> None:
    with soon(15.0), pytest.raises(EngineDeadError, match=message):  # the start of the processes included
        start(2, {0: sabotage.load_in_small_steps, 1: harm})


def test_stopped_rank_ends_the_engine_after_step_timeout(start: Callable[..., LLM]) -> None:
    llm = start(3, step_timeout=2.0)
    os.kill(workers()[1], signal.SIGSTOP)
    with (
        soon(8.0),
        pytest.raises(EngineDeadError, match=r"^rank 1 is stopped or hangs; rank [02] waited for it in vain"),
    ):
        generate(llm)


def test_slow_or_briefly_stopped_rank_is_waited_for(start: Callable[..., LLM], tiny: Any) -> None:
    num_threads = torch.get_num_threads()
    with start(2, {1: sabotage.sleep_in_layer}) as llm:
        pid = workers()[1]
        assert generate(llm) == tiny("qwen3").greedy(PROMPT, 16)
        os.kill(pid, signal.SIGSTOP)
        after(1.0, lambda: os.kill(pid, signal.SIGCONT))
        assert generate(llm) == tiny("qwen3").greedy(PROMPT, 16)
    assert torch.get_num_threads() == num_threads


def test_ranks_with_different_memory_have_the_same_number_of_blocks(start: Callable[..., LLM], tiny: Any) -> None:
    with start(2, {1: sabotage.have_little_memory}, num_kv_blocks=None) as llm:
        block_bytes = 2 * 2 * 16 * 1 * 32 * 4  # layers, k and v, tokens, this rank's heads, head_dim, float32
        assert llm.get_stats().num_total_blocks == 2**19 // block_bytes
        assert generate(llm) == tiny("qwen3").greedy(PROMPT, 16)
        # Another one at more than one rank has to wait; at one rank it doesn't.
        with pytest.raises(ValueError, match="already has a torch process group"):
            start(2)
        with start(1) as one, start(1) as two:
            assert generate(one) == generate(two) == generate(llm)
    llm.close()


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanollm.runtime.ranks._start_worker", lambda *args: pytest.fail("a process was started"))


@pytest.mark.parametrize("size", [5, 64])
def test_more_ranks_than_heads_is_refused_before_any_process_starts(
    start: Callable[..., LLM], no_process: None, size: int
) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size {size} .* 4 attention heads: give 1 to 4"):
        start(size)


def test_more_ranks_than_inner_features_is_refused_before_any_process_starts(tiny: Any, no_process: None) -> None:
    for inner, message in (
        ({"moe_intermediate_size": 2}, "moe_intermediate_size 2 can't be split over 3 ranks: give .* 1 to 2"),
        ({"intermediate_size": 2, "mlp_only_layers": [0]}, "^intermediate_size 2 can't be split over 3 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny("qwen3_moe", **inner).llm(tensor_parallel_size=3)


def test_more_ranks_than_gpus_is_refused_before_any_process_starts(
    start: Callable[..., LLM], no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="size 3 needs 3 GPUs here, but there are 2"):
        start(3, device="cuda")


def test_a_fork_ends_nothing(start: Callable[..., LLM]) -> None:
    llm = start(2)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            llm.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert generate(llm)
    llm.close()


def test_garbage_collection_ends_the_ranks(start: Callable[..., LLM]) -> None:
    taken = [socket.create_server(("127.0.0.1", 0))]
    for port in (2333, 29500):  # what others use
        with contextlib.suppress(OSError):
            taken.append(socket.create_server(("127.0.0.1", port)))
    llm = start(2)
    stream = llm.generate_stream(PROMPT, GREEDY)
    next(stream)
    assert list(workers()) == [1]
    with soon():
        del llm, stream
        gc.collect()
        assert_nothing_is_left()
    for sock in taken:
        sock.close()


@pytest.mark.parametrize("phase", ["load", "step"])
def test_interrupt_inside_a_program_that_goes_on(start: Callable[..., LLM], tiny: Any, phase: str) -> None:
    def interrupt() -> None:
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    interrupted: list[float] = []
    harms = {1: sabotage.load_slowly if phase == "load" else sabotage.hang_in_layer}
    with pytest.raises(KeyboardInterrupt):
        if phase == "load":
            after(5.0, interrupt)
            start(2, harms)
        else:
            llm = start(2, harms)
            after(1.0, interrupt)
            generate(llm)
    assert time.monotonic() - interrupted[0] < 5
    assert_nothing_is_left()


class Program:
    """tests/runtime/program.py in a session of its own, so that all its processes can be found."""

    def __init__(self, phase: str, model: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.program", phase, model],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert word in iter(lambda: self.process.stdout.readline().strip() or "the end", "the end")

    def assert_gone_soon(self, seconds: float = 5.0) -> str:
        """Every process of it ends within so many seconds; returns what was written to stderr."""
        deadline = time.monotonic() + seconds
        while left := [p for p in psutil.process_iter() if self._is_ours(p)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        return self.process.communicate(timeout=10)[1]

    def _is_ours(self, process: psutil.Process) -> bool:
        self.process.poll()  # so that it is no zombie
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(process.pid) == self.process.pid
        return False

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in filter(self._is_ours, psutil.process_iter()):
            process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    ("phase", "word"), [("start", "starting"), ("load", "loading"), ("step", "hanging"), ("idle", "idle")]
)
def test_ctrl_c_ends_every_process_without_noise(tiny: Any, phase: str, word: str) -> None:
    with Program(phase, tiny("qwen3").path) as program:
        program.wait_for(word)
        time.sleep(0.5)
        os.killpg(program.process.pid, signal.SIGINT)
        stderr = program.assert_gone_soon()
    assert stderr.rstrip().endswith("KeyboardInterrupt") and stderr.count("KeyboardInterrupt") == 1, stderr
    assert program.process.returncode == -signal.SIGINT


@pytest.mark.parametrize(("phase", "word"), [("start", "starting"), ("load", "loading"), ("step", "hanging")])
def test_workers_end_by_themselves_when_the_program_is_killed(tiny: Any, phase: str, word: str) -> None:
    with Program(phase, tiny("qwen3").path) as program:
        program.wait_for(word)
        time.sleep(0.5)
        program.process.kill()
        # A worker that is still importing PyTorch looks around only when it has done so.
        program.assert_gone_soon(15.0 if phase == "start" else 5.0)


def test_two_programs_at_once_that_end_without_closing(tiny: Any) -> None:
    path = tiny("qwen3").path
    with Program("to the end", path) as first, Program("to the end", path) as second:
        for program in (first, second):
            program.wait_for("done")
        for program in (first, second):
            assert program.assert_gone_soon() == ""
            assert program.process.returncode == 0


def test_program_from_standard_input_is_told_to_be_a_file(tiny: Any) -> None:
    script = f"from nanollm import LLM\nLLM({tiny('qwen3').path!r}, tensor_parallel_size=2, device='cpu')"
    result = subprocess.run([sys.executable, "-"], input=script, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "ValueError" in result.stderr and "but <stdin> is no file: save it in one" in result.stderr.splitlines()[-1]


def test_program_without_a_main_guard_is_told_so(tiny: Any) -> None:
    with Program("unguarded", tiny("qwen3").path) as program:
        assert program.process.wait(60) == 1
        stderr = program.assert_gone_soon()
    assert 'under `if __name__ == "__main__":`' in stderr.splitlines()[-1]
