"""AsyncLLMEngine with the real engine process: outputs, aborts, back-pressure, and what happens when a process dies.

The oracle is greedy decoding in transformers.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import psutil
import pytest

from nanollm import AsyncLLMEngine, EngineDeadError, RequestOutput, SamplingParams
from nanollm.async_engine import _DECODER, QueueFullError
from nanollm.engine.engine_process import Died, Refused, pack
from tests.conftest import DEVICE, TinyModel, random_prompt

SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "float32",
    "block_size": 16,
    "num_kv_blocks": 64,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


class Loop:
    """An event loop with an engine in it that tests share."""

    def __init__(self, path: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = AsyncLLMEngine(path, max_waiting=4, **SETTINGS)
        self.run(self.engine.start())

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 60.0) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, timeout))


@pytest.fixture(scope="module")
def model(tiny: Any) -> TinyModel:
    return tiny("qwen3")


@pytest.fixture(scope="module")
def shared(model: TinyModel) -> Iterator[Loop]:
    shared = Loop(model.path)
    yield shared
    shared.run(shared.engine.close())
    shared.loop.close()


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def is_idle(engine: AsyncLLMEngine, seconds: float = 5.0) -> bool:
    """Whether the engine comes to have no request and all blocks free."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        stats = engine.stats
        if stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_total_blocks:
            return engine._num_unfinished == 0
        await asyncio.sleep(0.01)
    return False


def greedy(num_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **others)


def test_many_at_once_get_the_tokens_they_get_alone(shared: Loop, model: TinyModel) -> None:
    prompts = [random_prompt(length) for length in (1, 5, 16, 17, 40)]

    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*(last(shared.engine.generate(prompt, greedy(9))) for prompt in prompts))

    outputs = shared.run(run())
    assert [output.outputs[0].token_ids for output in outputs] == [model.greedy(prompt, 9) for prompt in prompts]
    for output in outputs:
        assert output.finished and output.metrics is not None
        assert 0 < output.metrics.ttft < 60 and output.metrics.num_tokens == 9


def test_each_output_contains_the_one_before(shared: Loop, model: TinyModel) -> None:
    prompt = random_prompt(6)

    async def run() -> list[list[int]]:
        return [out.outputs[0].token_ids async for out in shared.engine.generate(prompt, greedy(12), "mine")]

    seen = shared.run(run())
    assert len(seen) > 1
    for shorter, longer in itertools.pairwise(seen):
        assert longer[: len(shorter)] == shorter and len(longer) > len(shorter)
    assert seen[-1] == model.greedy(prompt, 12)


def test_a_reader_who_comes_late_finds_everything_in_one_output(shared: Loop, model: TinyModel) -> None:
    prompt = random_prompt(7)

    async def run() -> list[list[int]]:
        async with aclosing(shared.engine.generate(prompt, greedy(20))) as outputs:
            await anext(outputs)
            await asyncio.sleep(1.0)
            return [out.outputs[0].token_ids async for out in outputs]

    seen = shared.run(run())
    assert seen[-1] == model.greedy(prompt, 20) and len(seen) <= 2


@pytest.mark.parametrize("n", [1, 3])
def test_closing_the_iterator_frees_all_blocks(shared: Loop, n: int) -> None:
    async def run() -> bool:
        params = SamplingParams(n=n, max_tokens=200, ignore_eos=True)
        async with aclosing(shared.engine.generate(random_prompt(40), params)) as outputs:
            await anext(outputs)
            assert shared.engine.stats.num_free_blocks < shared.engine.stats.num_total_blocks
        return await is_idle(shared.engine)

    assert shared.run(run())


def test_cancelled_while_it_waits_for_a_place(shared: Loop, model: TinyModel) -> None:
    async def run() -> bool:
        first = [asyncio.create_task(last(shared.engine.generate(random_prompt(5, i), LONG))) for i in range(4)]
        await asyncio.sleep(0.1)
        waits = asyncio.create_task(last(shared.engine.generate(random_prompt(9), greedy(1))))
        while shared.engine.stats.num_waiting == 0:
            await asyncio.sleep(0.001)
        waits.cancel()
        while shared.engine.stats.num_waiting:
            await asyncio.sleep(0.001)
        assert shared.engine.stats.num_running == 4  # nobody had to end for it
        for task in first:
            task.cancel()
        await asyncio.gather(*first, waits, return_exceptions=True)
        return await is_idle(shared.engine)

    assert shared.run(run())


def test_more_than_may_wait_are_refused_and_the_others_finish(shared: Loop, model: TinyModel) -> None:
    prompt = random_prompt(5)

    async def run() -> list[Any]:
        outputs = [last(shared.engine.generate(prompt, greedy(3))) for _ in range(11)]
        return await asyncio.gather(*outputs, return_exceptions=True)

    results = shared.run(run())
    refused = [result for result in results if isinstance(result, QueueFullError)]
    answers = [result.outputs[0].token_ids for result in results if isinstance(result, RequestOutput)]
    assert len(refused) == 3  # 4 run, 4 wait
    assert answers == [model.greedy(prompt, 3)] * 8


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(1), "prompt is empty"),
        ([300], greedy(1), "from 0 to 299, got 300"),
        ([1] * 256, greedy(1), "max_model_len is 256"),
        ([1], greedy(1, logprobs=21), "logprobs must be from 0 to 20, got 21"),
        ([1], greedy(1, stop_token_ids=[300]), "stop_token_ids must be from 0 to 299"),
        ([1], greedy(1, n=9), "n must be at most 8"),
        ("text", greedy(1), "needs a tokenizer"),
        (5, greedy(1), "a prompt must be"),
        ({"prompt_token_ids": [1], "cache_salt": "\ud800"}, greedy(1), "surrogates not allowed"),
    ],
)
def test_a_bad_request_fails_alone(
    shared: Loop, model: TinyModel, prompt: Any, params: SamplingParams, message: str
) -> None:
    good = random_prompt(4)

    async def run() -> list[Any]:
        both = last(shared.engine.generate(good, greedy(5))), last(shared.engine.generate(prompt, params))
        return await asyncio.gather(*both, return_exceptions=True)

    output, error = shared.run(run())
    assert output.outputs[0].token_ids == model.greedy(good, 5)
    assert isinstance(error, ValueError) and message in str(error)


def test_errors_cross_whatever_they_quote() -> None:
    refused, died = (_DECODER.decode(pack(message)) for message in (Refused(7, "bad \ud800"), Died("why \udc80")))
    assert refused == Refused(7, r"bad \ud800") and died == Died(r"why \udc80")


def test_parameters_of_many_prompts_are_checked_once(shared: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any prompt: what can never fit is no matter of waiting, and long lists are not checked again and again."""
    checks = []
    check = SamplingParams.__post_init__
    monkeypatch.setattr(SamplingParams, "__post_init__", lambda params: checks.append(params) or check(params))

    async def run(params: SamplingParams) -> list[tuple[int, RequestOutput]]:
        return [output async for output in shared.engine.generate_all([[1], [2], [3]], params, stream=False)]

    params = greedy(1, allowed_token_ids=list(range(300)))
    checks.clear()
    assert len(shared.run(run(params))) == 3 and len(checks) == 1
    with pytest.raises(ValueError, match="prompts times n must be at most 8, max_num_seqs \\+ max_waiting, got 9"):
        shared.run(run(greedy(1, n=3)))


def test_a_request_id_is_free_again_when_its_request_is_done(shared: Loop) -> None:
    async def run() -> None:
        async with aclosing(shared.engine.generate([1], LONG, "a")) as outputs:
            assert (await anext(outputs)).request_id == "a"
            with pytest.raises(ValueError, match="request_id 'a' is in use"):
                await anext(shared.engine.generate([2], LONG, "a"))
        await last(shared.engine.generate([1], greedy(1), "a"))

    shared.run(run())


def test_five_hundred_that_are_cancelled_at_once(shared: Loop) -> None:
    async def run() -> bool:
        tasks = [asyncio.create_task(last(shared.engine.generate(random_prompt(30, i), LONG))) for i in range(500)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await is_idle(shared.engine)

    assert shared.run(run())


def test_bad_engine_arguments_raise_as_in_llm() -> None:
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        AsyncLLMEngine("m", max_num_seq=1)
    with pytest.raises(ValueError, match="no such file"):
        asyncio.run(AsyncLLMEngine("./nothing").start())


@pytest.mark.parametrize("params", [None, LONG])
def test_before_it_was_started_callers_are_told_to_start_it(params: SamplingParams | None) -> None:
    with pytest.raises(EngineDeadError, match="was not started"):
        asyncio.run(last(AsyncLLMEngine("m").generate([1], params)))


def test_what_only_the_engine_process_finds_is_the_users_error_too(model: TinyModel) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size 7 doesn't work"):
        asyncio.run(AsyncLLMEngine(model.path, **SETTINGS, tensor_parallel_size=7).start())


@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks need two GPUs")
def test_a_killed_rank_is_told_to_all_callers_and_nothing_stays(model: TinyModel) -> None:
    async def run() -> tuple[list[Any], float]:
        async with AsyncLLMEngine(model.path, **SETTINGS, tensor_parallel_size=2) as engine:
            process = psutil.Process(engine._process.pid)
            everyone = [process, *process.children(recursive=True)]
            (rank,) = [child for child in everyone if "spawn_main" in " ".join(child.cmdline())]
            callers = [asyncio.create_task(last(engine.generate(random_prompt(5, i), LONG))) for i in range(3)]
            await asyncio.sleep(0.5)
            start = time.monotonic()
            rank.kill()
            results = await asyncio.gather(*callers, return_exceptions=True)
            seconds = time.monotonic() - start
            await engine.dead.wait()
            with pytest.raises(EngineDeadError):
                await last(engine.generate([1], LONG))
        _, alive = psutil.wait_procs(everyone, timeout=10)
        assert not alive
        return results, seconds

    results, seconds = asyncio.run(run())
    assert seconds < 5
    for error in results:
        assert isinstance(error, EngineDeadError) and "SIGKILL" in str(error)


@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks need two GPUs")
def test_a_rank_that_is_killed_while_nothing_runs_is_noticed(model: TinyModel) -> None:
    async def run() -> None:
        async with AsyncLLMEngine(model.path, **SETTINGS, tensor_parallel_size=2) as engine:
            await last(engine.generate([1], greedy(1)))
            (rank,) = [
                child
                for child in psutil.Process(engine._process.pid).children(recursive=True)
                if "spawn_main" in " ".join(child.cmdline())
            ]
            rank.kill()
            await asyncio.wait_for(engine.dead.wait(), 5)

    asyncio.run(run())
