"""The offline API at its edges: inputs, errors, streaming, threads, closing."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanollm import LLM, EngineDeadError, SamplingParams
from nanollm.layers.activation import GatedMLP
from nanollm.sampling_params import StructuredOutputsParams
from tests.conftest import DEVICE, VOCAB_SIZE, random_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Any:
    with tiny("qwen3").llm() as llm:
        yield llm


def assert_empty(llm: LLM) -> None:
    """Nothing runs, waits, or holds a block."""
    stats = llm.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_total_blocks)
    llm._engine.scheduler.sanity_checks()


def test_outputs_have_the_field_names_of_vllm_and_the_order_of_the_prompts(tiny: Any, llm: LLM) -> None:
    prompts = [random_prompt(n) for n in (30, 3, 17)]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 9, 5)])
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 9, 5]
    first = outputs[0]
    assert (first.request_id, first.prompt, first.finished, first.num_cached_tokens) == ("0", None, True, 0)
    assert (first.outputs[0].index, first.outputs[0].finish_reason, first.outputs[0].stop_reason) == (0, "length", None)
    assert first.outputs[0].text == ""
    times = first.metrics
    assert times is not None and times.first_scheduled_time is not None and times.finished_time is not None
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time
    assert times.ttft == times.first_token_time - times.arrival_time


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        [[5, 6, 7]],
        (5, 6, 7),
        torch.tensor([5, 6, 7]),
        {"prompt_token_ids": [5, 6, 7]},
        [{"prompt_token_ids": [5, 6, 7], "prompt": "as text"}],
    ],
)
def test_every_form_of_one_prompt(tiny: Any, llm: LLM, prompt: Any) -> None:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == tiny("qwen3").greedy([5, 6, 7], 8)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == [] == llm.compute_logits([])
    assert list(llm.generate_stream([])) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ([1, -1], f"token 1 must be from 0 to {VOCAB_SIZE - 1}, got -1"),
        ([VOCAB_SIZE], f"from 0 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"),
        ([2**31], "got 2147483648"),
        ([3.0], "must be an integer, got 3.0"),
        ([True], "must be an integer, got True"),
        ("text", "needs a tokenizer"),
        ({"prompt_tokens": [1]}, "unknown prompt field 'prompt_tokens'"),
        ({}, 'needs "prompt" or "prompt_token_ids"'),
        ({"prompt": 5}, "must be strings"),
        ([1] * 256, "prompt has 256 tokens, but max_model_len is 256"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        llm.generate([[5, 6, 7], prompt], GREEDY)
    assert str(error.value).startswith("prompt 1: ")
    assert_empty(llm)


def test_an_object_that_is_no_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises((ValueError, TypeError)):
        llm.generate(5, GREEDY)  # type: ignore[arg-type]


def test_one_sampling_params_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(ValueError, match="3 prompts came with 2 sampling_params"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])
    for params, message in (
        ([GREEDY], "1 sampling_params came with more prompts: give one for all, or one each"),
        ([GREEDY] * 3, "2 prompts came with more sampling_params"),
    ):
        with pytest.raises(ValueError, match=message):
            list(llm.generate(iter([[1], [2]]), params, use_tqdm=False))
    for bad in ([{"temperature": 0}], {"temperature": 0}, 5):
        for prompts in ([[1]], iter([[1]])):
            with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
                list(llm.generate(prompts, bad, use_tqdm=False))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="stop_token_ids must be from 0 to 299, got 300"):
        llm.generate([[1]], SamplingParams(stop_token_ids=[300]))


def test_a_prompt_that_can_never_fit_the_cache_is_refused_with_the_numbers(tiny: Any) -> None:
    with tiny("qwen3").llm(num_kv_blocks=2) as llm:
        with pytest.raises(ValueError, match="prompt has 33 tokens, but the KV cache holds 32"):
            llm.generate([[1] * 33], GREEDY)
        assert len(llm.generate([[1] * 32], GREEDY)[0].outputs[0].token_ids) == 1


def test_generation_runs_to_the_end_of_the_context(tiny: Any) -> None:
    model = tiny("qwen3")
    prompt = random_prompt(20)
    with model.llm(max_model_len=30) as llm:
        for max_tokens in (None, 2**31 - 1, 11):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == model.greedy(prompt, 10)
            assert output.outputs[0].finish_reason == "length"
        (logits,) = llm.compute_logits([random_prompt(30)])
        torch.testing.assert_close(logits, model.logits(random_prompt(30)), atol=1e-4, rtol=0)
        with pytest.raises(ValueError, match="prompt has 31 tokens, but max_model_len is 30"):
            llm.compute_logits([random_prompt(31)])
    with pytest.raises(ValueError, match="max_model_len 257 is longer than the model's 256"):
        model.llm(max_model_len=257)


def test_eos_and_stop_tokens(tiny: Any) -> None:
    model = tiny("qwen3")
    prompt = random_prompt(20)
    expected = model.greedy(prompt, 12)
    first, later = expected[0], next(t for t in expected if t != expected[0])
    at = expected.index(later) + 1

    def run(llm: LLM, **params: Any) -> tuple[list[int], Any, Any]:
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, **params), use_tqdm=False)
        completion = output.outputs[0]
        return completion.token_ids, completion.finish_reason, completion.stop_reason

    for overlap in (False, True):
        with model.llm(overlap=overlap, hf_overrides={"eos_token_id": [0, later]}) as llm:
            assert run(llm, max_tokens=12) == (expected[:at], "stop", None)
            assert run(llm, max_tokens=at) == (expected[:at], "stop", None)  # EOS exactly at max_tokens
            assert run(llm, max_tokens=12, ignore_eos=True) == (expected, "length", None)
            assert run(llm, max_tokens=12, stop_token_ids=[first]) == ([first], "stop", first)
            assert run(llm, max_tokens=12, stop_token_ids=[first], ignore_eos=True) == ([first], "stop", first)
            assert_empty(llm)
        with model.llm(overlap=overlap, hf_overrides={"eos_token_id": first}) as llm:
            assert run(llm, max_tokens=12) == ([first], "stop", None)  # EOS as the very first token


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    prompts = [random_prompt(n) for n in (4, 20, 7)]
    expected = {o.request_id: o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)}
    seen: dict[str, int] = {}
    for output in llm.generate_stream(prompts, GREEDY):
        ids = output.outputs[0].token_ids
        assert ids == expected[output.request_id][: len(ids)] and len(ids) > seen.get(output.request_id, 0)
        assert output.finished == (len(ids) == 8)
        seen[output.request_id] = len(ids)
    assert seen == dict.fromkeys(expected, 8)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_closed_early_leaves_the_engine_empty(tiny: Any, overlap: bool) -> None:
    with tiny("qwen3").llm(overlap=overlap) as llm:
        stream = llm.generate_stream([random_prompt(n) for n in (4, 20)], GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert_empty(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_an_exception_in_a_step_the_engine_is_empty_and_right(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, error: type[BaseException]
) -> None:
    model = tiny("qwen3")
    prompts = [random_prompt(n, seed=5) for n in (4, 40, 33)]
    calls = 0
    forward = GatedMLP.forward

    def fail_once(self: GatedMLP, hidden: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise error("from a layer")
        return forward(self, hidden)

    with model.llm(overlap=overlap, enforce_eager=True) as llm:  # a CUDA graph would not call it
        monkeypatch.setattr(GatedMLP, "forward", fail_once)
        with pytest.raises(error, match="from a layer"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_empty(llm)
        outputs = llm.generate(prompts[::-1], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [model.greedy(p, 8) for p in prompts[::-1]]


@pytest.mark.parametrize(("overlap", "order"), [(True, "wait launch text"), (False, "launch wait text")])
def test_no_launch_waits_for_the_text_of_earlier_tokens(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, order: str
) -> None:
    with tiny("qwen3").llm(overlap=overlap) as llm:
        events: list[str] = []

        def note(owner: Any, name: str, event: str) -> None:
            method = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args: events.append(event) or method(*args))

        note(llm._executor, "submit", "launch")
        note(llm._executor, "collect", "wait")
        note(llm._processor, "process", "text")
        list(llm.generate_stream([random_prompt(9)], GREEDY))
    steps = " ".join(events).split(" text")[1:-3]  # at the end there is nothing to launch
    assert [step.strip() + " text" for step in steps] == [order] * 5


def test_inside_a_running_event_loop(llm: LLM) -> None:
    async def main() -> Any:
        return llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)

    assert len(asyncio.run(main())[0].outputs[0].token_ids) == 8


def test_several_threads_share_one_engine(tiny: Any, llm: LLM) -> None:
    prompts = [random_prompt(n, seed=6) for n in (3, 18, 25, 40)]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        for _ in range(3):
            results[i] = llm.generate([prompts[i]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {i: tiny("qwen3").greedy(prompt, 8) for i, prompt in enumerate(prompts)}
    assert_empty(llm)


def test_two_streams_of_one_thread_interleave(tiny: Any, llm: LLM) -> None:
    a, b = random_prompt(9), random_prompt(21)
    last: list[Any] = [None, None]
    for last[0], last[1] in zip(llm.generate_stream([a], GREEDY), llm.generate_stream([b], GREEDY), strict=True):
        pass
    assert [o.outputs[0].token_ids for o in last] == [tiny("qwen3").greedy(a, 8), tiny("qwen3").greedy(b, 8)]


def test_prompts_share_a_cached_prefix_within_one_salt_only(llm: LLM) -> None:
    prompt = random_prompt(40, seed=7)

    def cached(**extra: str) -> int:
        return llm.generate([{"prompt_token_ids": prompt} | extra], GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [
        0, 32, 0, 32, 0, 32,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_num_seq": 4}, "unknown engine argument 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"tp": 4}, "unknown engine argument 'tp'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer from 1 to 65536, got 0"),
        ({"block_size": 24}, "block_size must be a power of two"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"num_kv_blocks": 5, "kv_cache_memory_bytes": 2**20}, "give one of them"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a finite number from 0.01 to 1, got 1.5"),
        ({"kv_cache_memory_bytes": 5, "num_kv_blocks": None}, "no room for the KV cache"),
        ({"kv_cache_memory_bytes": 2**50, "num_kv_blocks": None}, "1125899906842624 takes 1048576.0 GiB on each rank"),
        ({"num_kv_blocks": 2**31 - 1}, "num_kv_blocks 2147483647 takes 32768.0 GiB on each rank, and there are"),
        ({"num_kv_blocks": 2**31}, "num_kv_blocks must be an integer from 1 to 2147483647"),
    ],
)
def test_bad_engine_arguments(tiny: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        tiny("qwen3").llm(**kwargs)


@pytest.mark.parametrize("block_size", [1, 4096])
def test_blocks_of_any_size_give_the_same_tokens(tiny: Any, block_size: int) -> None:
    model, prompt = tiny("qwen3"), random_prompt(20)
    with model.llm(block_size=block_size, num_kv_blocks=max(64 // block_size, 1)) as llm:
        assert llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == model.greedy(prompt, 8)


def test_kv_cache_size_is_obeyed(tiny: Any) -> None:
    block_bytes = 2 * 2 * 16 * 2 * 32 * 4  # layers, k and v, tokens, heads, head_dim, float32
    with tiny("qwen3").llm(num_kv_blocks=7) as llm:
        assert llm.get_stats().num_total_blocks == 7
    with tiny("qwen3").llm(num_kv_blocks=None, kv_cache_memory_bytes=10 * block_bytes + 1) as llm:
        assert llm.get_stats().num_total_blocks == 10


def test_named_shapes_need_no_file_and_no_tokenizer() -> None:
    tiny_shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 500, "head_dim": 16}
    runs = []
    for seed in (0, 0, 1):
        with LLM(
            "qwen3-0.6b", load_format="dummy", seed=seed, hf_overrides=tiny_shape, num_kv_blocks=8, device=DEVICE
        ) as llm:
            assert llm.tokenizer is None
            runs.append(llm.compute_logits([[1, 2, 3]])[0])
    assert torch.equal(runs[0], runs[1]) and not torch.allclose(runs[0], runs[2])


def test_a_closed_engine_says_so(tiny: Any) -> None:
    llm = tiny("qwen3").llm()
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this engine was closed"):
        llm.generate([[1]], GREEDY)


def test_a_stream_open_at_close_says_so(tiny: Any) -> None:
    llm = tiny("qwen3").llm()
    stream = llm.generate_stream([random_prompt(9)], GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(EngineDeadError, match="this engine was closed"):
        list(stream)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stream_dropped_inside_a_step_ends_after_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """As when garbage collection closes it in the thread that runs the step."""
    model = tiny("qwen3")
    with model.llm(overlap=overlap, enforce_eager=True) as llm:
        streams = [llm.generate_stream([random_prompt(9)], SamplingParams(max_tokens=100, ignore_eos=True))]
        next(streams[0])
        forward = GatedMLP.forward

        def drop(self: GatedMLP, hidden: Any) -> Any:
            if streams:
                streams.pop().close()  # type: ignore[attr-defined]
            return forward(self, hidden)

        monkeypatch.setattr(GatedMLP, "forward", drop)
        (output,) = llm.generate([random_prompt(21)], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == model.greedy(random_prompt(21), 8)
        assert_empty(llm)


def test_a_tokenizer_that_fails_in_the_middle_loses_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    process, calls = llm._processor.process, []

    def fail_once(outputs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("from the tokenizer")
        return process(outputs)

    monkeypatch.setattr(llm._processor, "process", fail_once)
    with pytest.raises(RuntimeError, match="from the tokenizer"):
        llm.generate([random_prompt(9), random_prompt(4)], GREEDY, use_tqdm=False)
    assert_empty(llm)
    assert len(llm.generate([random_prompt(9)], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_an_iterator_gives_what_a_list_gives_and_in_its_order(llm: LLM) -> None:
    prompts = [random_prompt(1 + i % 7, seed=i) for i in range(300)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (37 * i) % 11, ignore_eos=True) for i in range(300)]
    expected = llm.generate(prompts, params, use_tqdm=False)
    found = list(llm.generate(iter(prompts), iter(params), use_tqdm=False))
    assert [output.request_id for output in found] == [str(i) for i in range(300)]
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]
    assert_empty(llm)


def test_an_endless_iterator_is_read_as_far_as_there_is_room(llm: LLM) -> None:
    """max_num_seqs is 16. The first prompt takes long, and outputs that wait for it must not pile up."""
    num_taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_taken
        while True:
            num_taken += 1
            yield random_prompt(3, seed=num_taken)

    def params() -> Iterator[SamplingParams]:
        yield SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        yield from itertools.repeat(SamplingParams(temperature=0, max_tokens=1))

    outputs = llm.generate(prompts(), params(), use_tqdm=False)
    assert num_taken == 0
    assert len(next(outputs).outputs[0].token_ids) == 200
    assert num_taken == 16 * 16
    for _ in range(1000):
        next(outputs)
    assert 1001 <= num_taken <= 1001 + 16 * 16
    assert len(llm._mailboxes) <= 2 * 16
    outputs.close()  # type: ignore[attr-defined]
    assert_empty(llm)


def test_a_bad_prompt_of_an_iterator_comes_after_the_outputs_before_it(llm: LLM) -> None:
    outputs = llm.generate(iter([random_prompt(30), random_prompt(2), [VOCAB_SIZE], [1]]), GREEDY, use_tqdm=False)
    assert [len(next(outputs).outputs[0].token_ids) for _ in range(2)] == [8, 8]
    with pytest.raises(ValueError, match=f"prompt 2: .*{VOCAB_SIZE}"):
        next(outputs)
    assert_empty(llm)


def test_an_iterator_that_raises_comes_after_the_outputs_before_it(llm: LLM) -> None:
    def prompts() -> Iterator[list[int]]:
        yield [5, 6]
        raise OSError("the disk is gone")

    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    next(outputs)
    with pytest.raises(OSError, match="the disk is gone"):
        next(outputs)
    assert_empty(llm)
    assert list(llm.generate(iter([]), GREEDY, use_tqdm=False)) == []


def test_a_slow_iterator_does_not_hold_up_what_was_taken(llm: LLM) -> None:
    num_taken = 0

    def prompts() -> Iterator[list[int]]:
        nonlocal num_taken
        while True:
            time.sleep(0.1)
            num_taken += 1
            yield [num_taken]

    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    next(outputs)
    assert num_taken <= 5  # there is room for 32
    outputs.close()  # type: ignore[attr-defined]
    assert_empty(llm)


def test_a_grammar_in_the_making_does_not_hold_up_what_was_taken(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Grammar:
        is_decided = False

        def result(self) -> Any:
            assert self.is_decided  # nobody waits
            raise ValueError("structured_outputs.choice: bad")

    grammar = Grammar()
    monkeypatch.setattr(llm._engine, "_grammars", SimpleNamespace(compile=lambda wanted: grammar))
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    outputs = llm.generate(iter([[5, 6], [7], [8]]), iter([GREEDY, asked, GREEDY]), use_tqdm=False)
    assert len(next(outputs).outputs[0].token_ids) == 8
    grammar.is_decided = True
    with pytest.raises(ValueError, match=r"prompt 1: structured_outputs\.choice: bad"):
        next(outputs)
    assert_empty(llm)


def test_a_stream_of_an_iterator(llm: LLM) -> None:
    last = {}
    for output in llm.generate_stream(iter([[5, 6], [7]]), SamplingParams(temperature=0, max_tokens=8, n=2)):
        last[output.request_id] = output
    expected = llm.generate([[5, 6], [7]], SamplingParams(temperature=0, max_tokens=8, n=2), use_tqdm=False)
    assert [[c.token_ids for c in last[str(i)].outputs] for i in range(2)] == [
        [c.token_ids for c in output.outputs] for output in expected
    ]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, GREEDY, "prompts must be one prompt, or a list or an iterator of them, got None"),
        (5, GREEDY, "prompts must be one prompt, or a list or an iterator of them, got 5"),
        (b"bytes", GREEDY, "prompts must be one prompt, or a list or an iterator of them"),
        (bytearray(b"four"), GREEDY, "prompts must be one prompt, or a list or an iterator of them"),
        (memoryview(b"four"), GREEDY, "prompts must be one prompt, or a list or an iterator of them"),
        ([bytearray(b"four")], GREEDY, "prompt 0: a prompt must be a string, a list of token ids or a dict"),
        ({"prompt_token_ids": memoryview(b"four")}, GREEDY, "prompt 0: a prompt must be a string"),
        ({"prompt_token_ids": [1], "cache_salt": 0}, GREEDY, "prompt 0: prompt and cache_salt must be strings"),
        (torch.tensor(3), GREEDY, "prompts must be one prompt, or a list or an iterator of them"),
        ({1, 2}, GREEDY, "prompts must be one prompt, or a list or an iterator of them"),
        ([[1]], SamplingParams, "sampling_params must be SamplingParams or a list of them"),
        ([[1]], 5, "sampling_params must be SamplingParams or a list of them, got 5"),
        ({1: 2, "a": 3}, GREEDY, "unknown prompt field 1"),
    ],
)
def test_what_is_no_prompt_and_no_params_is_named(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert_empty(llm)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 10**400}, "temperature must be a finite number from 0 to 100"),
        ({"temperature": float("nan")}, "temperature must be a finite number from 0 to 100, got nan"),
        ({"temperature": -1}, "temperature must be a finite number from 0 to 100, got -1"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop": ""}, "stop must be a non-empty string"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1 to 2147483647, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"max_tokens": "8"}, "max_tokens must be an integer"),
        ({"max_tokens": 2**31}, "max_tokens must be an integer"),
        ({"seed": 2**63}, "seed must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
    ],
)
def test_bad_sampling_params_name_field_value_and_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-20])
def test_a_temperature_too_small_to_divide_by_is_greedy(tiny: Any, llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([random_prompt(9)], params, use_tqdm=False)
    assert output.outputs[0].token_ids == tiny("qwen3").greedy(random_prompt(9), 8)


def test_one_message_without_its_list_is_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match="messages must be a list of messages"):
        llm.chat({"role": "user", "content": "x"})  # type: ignore[arg-type]
