"""Every sampling setting through the whole engine, on tiny models, against transformers and arithmetic."""

import math
import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from nanollm import LLM, SamplingParams
from nanollm.engine import scheduler
from nanollm.runtime import rows
from tests.conftest import VOCAB_SIZE, TinyModel, random_prompt

README = Path(__file__).parents[1] / "README.md"
FREE = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
EVERYTHING = SamplingParams(
    temperature=1.2,
    top_k=100,
    top_p=0.95,
    min_p=0.001,
    seed=11,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    min_tokens=4,
    logit_bias={7: 4.0, 9: -3.0},
    max_tokens=24,
    ignore_eos=True,
)
TOP_P = SamplingParams(temperature=1.0, top_p=0.8, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tiny: Any) -> Any:
    return tiny("qwen3")


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Any:
    with model.llm() as llm:
        yield llm


def generate(llm: LLM, prompt: list[int], params: SamplingParams) -> Any:
    return llm.generate([prompt], params, use_tqdm=False)[0]


def tokens(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return generate(llm, prompt, params).outputs[0].token_ids


# The same in any company


@pytest.mark.parametrize("params", [FREE, EVERYTHING, TOP_P])
@pytest.mark.parametrize("overlap", [False, True])
def test_seeded_samples_are_the_same_alone_batched_chunked_and_preempted(
    model: TinyModel, llm: LLM, params: SamplingParams, overlap: bool
) -> None:
    prompts = [random_prompt(length, seed=4) for length in (3, 17, 40, 33)]
    expected = [tokens(llm, prompt, params) for prompt in prompts]
    assert len({token for row in expected for token in row}) > 20
    for settings in ({}, {"long_prefill_token_threshold": 7}, {"num_kv_blocks": 6}, {"enable_prefix_caching": False}):
        with model.llm(overlap=overlap, **settings) as other:
            outputs = other.generate(prompts * 3, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected * 3
            assert (other.get_stats().num_preemptions > 0) == ("num_kv_blocks" in settings)


def test_seeded_samples_are_the_same_alone_and_in_a_batch_of_256(model: TinyModel, llm: LLM) -> None:
    ours = [(random_prompt(length, seed=4), params) for length in (3, 40) for params in (FREE, EVERYTHING, TOP_P)]
    others = [(random_prompt(1 + i % 9, seed=i), SamplingParams(seed=i, max_tokens=24)) for i in range(250)]
    with model.llm(max_num_seqs=256, num_kv_blocks=1024) as big:
        batches: list[int] = []
        submit = big._executor.submit
        big._executor.submit = lambda plan: (batches.append(len(plan.row_ids_B)), submit(plan))  # type: ignore[method-assign]
        outputs = big.generate(*zip(*(others + ours), strict=True), use_tqdm=False)
    assert max(batches) == 256
    assert [output.outputs[0].token_ids for output in outputs[250:]] == [tokens(llm, *request) for request in ours]


@pytest.mark.parametrize("size", [2, 3])
def test_two_and_three_ranks_sample_what_one_samples(model: TinyModel, llm: LLM, size: int) -> None:
    prompts = [random_prompt(length, seed=4) for length in (3, 17, 40)]
    bans = SamplingParams(
        temperature=1.0, seed=2, max_tokens=12, allowed_token_ids=[5, 100, 150, 299], logprobs=3, prompt_logprobs=2
    )
    many = [FREE, EVERYTHING, TOP_P, bans, replace(bans, n=3, top_k=2)]
    requests = [(prompt, params) for prompt in prompts for params in many]
    expected = llm.generate(*zip(*requests, strict=True), use_tqdm=False)
    with model.llm(tensor_parallel_size=size) as other:
        outputs = other.generate(*zip(*requests, strict=True), use_tqdm=False)
    for ours, theirs in zip(outputs, expected, strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
        for one, other_one in zip(ours.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True):
            assert (one is None) == (other_one is None) and (one is None or one.keys() == other_one.keys())


# Penalties, bans and biases


def test_repetition_penalty_gives_the_tokens_of_transformers(model: TinyModel, llm: LLM) -> None:
    prompt = random_prompt(20, seed=9)
    for penalty in (1.3, 0.8, 0.01, 100.0):
        settings = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=30, repetition_penalty=penalty, pad_token_id=0, eos_token_id=None
        )
        ids = torch.tensor([prompt])
        expected = model.hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        params = SamplingParams(temperature=0, max_tokens=30, repetition_penalty=penalty, ignore_eos=True)
        assert tokens(llm, prompt, params) == expected[0, 20:].tolist()


def test_frequency_and_presence_penalties_token_by_token(model: TinyModel, llm: LLM) -> None:
    prompt = random_prompt(20, seed=9)
    output: list[int] = []
    for _ in range(30):
        logits = model.logits(prompt + output)[-1]
        for token_id in set(output):
            logits[token_id] -= 1.5 * output.count(token_id) - 0.5
        output.append(int(logits.argmax()))
    params = SamplingParams(temperature=0, max_tokens=30, frequency_penalty=1.5, presence_penalty=-0.5, ignore_eos=True)
    assert tokens(llm, prompt, params) == output


def test_logit_bias_decides(llm: LLM) -> None:
    prompt = random_prompt(8)
    greedy = tokens(llm, prompt, SamplingParams(temperature=0, max_tokens=1))
    assert tokens(llm, prompt, SamplingParams(temperature=0, max_tokens=3, logit_bias={"77": 100})) == [77] * 3
    assert tokens(llm, prompt, SamplingParams(temperature=0, max_tokens=1, logit_bias={greedy[0]: -100})) != greedy


def test_only_allowed_tokens_come(llm: LLM) -> None:
    allowed = [0, 4, 127, 128, 299]
    output = tokens(llm, random_prompt(8), replace(FREE, allowed_token_ids=allowed, temperature=50.0))
    assert set(output) <= set(allowed) and len(set(output)) > 2
    # A bias neither brings a token back nor is lost.
    biased = replace(FREE, allowed_token_ids=allowed, logit_bias={5: 100.0, 128: 100.0})
    assert tokens(llm, random_prompt(8), biased) == [128] * 24


def test_min_tokens_holds_off_every_end(llm: LLM) -> None:
    prompt = random_prompt(8)
    base = SamplingParams(temperature=0, max_tokens=12, logit_bias={1: 100.0})  # token 1 is EOS
    assert generate(llm, prompt, base).outputs[0].token_ids == [1]
    output = generate(llm, prompt, replace(base, min_tokens=6)).outputs[0]
    assert len(output.token_ids) == 7 and output.token_ids.index(1) == 6 and output.finish_reason == "stop"
    stop = SamplingParams(temperature=0, max_tokens=12, logit_bias={50: 100.0}, stop_token_ids=[50], min_tokens=3)
    assert tokens(llm, prompt, stop).index(50) == 3


def test_min_tokens_beyond_any_context_runs_to_its_end(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, min_tokens=2**31 - 5)
    (output,) = llm.generate([[5] * 10], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_min_tokens_counts_on_after_a_preemption(model: TinyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, logit_bias={1: 100.0}, min_tokens=30)
    with model.llm(num_kv_blocks=6, enable_prefix_caching=False) as llm:
        outputs = llm.generate([random_prompt(8, seed=i) for i in range(3)], params, use_tqdm=False)
        assert llm.get_stats().num_preemptions
    assert [len(output.outputs[0].token_ids) for output in outputs] == [31] * 3


class Letters:
    """Enough of a tokenizer for bad_words: a token a character, its code; a space before a word is not a token."""

    all_special_tokens: tuple[str, ...] = ()
    is_fast = False
    chat_template = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(char) for char in text.removeprefix(" ")]

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join(map(chr, token_ids))

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]


@pytest.fixture
def lettered(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(llm, "tokenizer", Letters())
    return llm


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_bad_words_do_not_come(lettered: LLM, length: int) -> None:
    """Bans the greedy output's own pieces until none is left of this length; then each token is the best allowed."""
    prompt, base = random_prompt(8), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    words: list[str] = []
    for _ in range(6):
        output = tokens(lettered, prompt, replace(base, bad_words=words))
        text = "".join(map(chr, output))
        assert not any(word in text for word in words)
        words.append(text[5 : 5 + length])
    assert len(set(words)) == 6


def test_bad_words_are_kept_in_mind_over_a_preemption(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(8, seed=i) for i in range(3)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with model.llm() as llm:
        free = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        monkeypatch.setattr(llm, "tokenizer", Letters())
        bad = [chr(a) + chr(b) for row in free for a, b in zip(row[::3], row[1::3], strict=False)]
        bad = [word for word in dict.fromkeys(bad) if word.strip()][:60]
        params = replace(params, bad_words=bad)
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert expected != free
    with model.llm(num_kv_blocks=6, enable_prefix_caching=False) as llm:
        monkeypatch.setattr(llm, "tokenizer", Letters())
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert llm.get_stats().num_preemptions


def test_a_row_without_any_possible_token_ends_with_an_error_and_the_others_go_on(lettered: LLM) -> None:
    stuck = SamplingParams(temperature=1.0, max_tokens=9, allowed_token_ids=[65], bad_words=["AAA"], ignore_eos=True)
    outputs = lettered.generate([random_prompt(5), random_prompt(9)], [stuck, FREE], use_tqdm=False)
    assert (outputs[0].outputs[0].token_ids, outputs[0].outputs[0].finish_reason) == ([65, 65], "error")
    assert outputs[1].outputs[0].token_ids == tokens(lettered, random_prompt(9), FREE)
    assert lettered.get_stats().num_running == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_few_rows_with_room_for_rules_give_the_same_tokens(
    model: TinyModel, llm: LLM, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    for module in (scheduler, rows):
        monkeypatch.setattr(module, "MAX_RULED_ROWS", 2)
    requests = [(random_prompt(9, seed=i), EVERYTHING if i % 3 else FREE) for i in range(12)]
    with model.llm(overlap=overlap, max_num_seqs=8) as few:
        assert few._executor.runner.rows.sampler.words_RV.shape == (2, 384)  # type: ignore[union-attr]
        outputs = few.generate(*zip(*requests, strict=True), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens(llm, *request) for request in requests]


# Log probabilities


@pytest.mark.parametrize("count", [0, 1, 20, VOCAB_SIZE, -1])
def test_logprobs_are_those_of_the_raw_distribution(model: TinyModel, count: int) -> None:
    prompt = random_prompt(20, seed=1)
    params = replace(EVERYTHING, logprobs=count, max_tokens=6)
    with model.llm(max_logprobs=-1) as llm:
        completion = generate(llm, prompt, params).outputs[0]
    expected = model.logits(prompt + completion.token_ids).log_softmax(-1)[len(prompt) - 1 :]
    assert completion.logprobs is not None and len(completion.logprobs) == 6
    for token_id, found, row in zip(completion.token_ids, completion.logprobs, expected, strict=False):
        assert next(iter(found)) == token_id
        top = set(row.topk(VOCAB_SIZE if count < 0 else count).indices.tolist())
        assert found.keys() == top | {token_id}
        for each, logprob in found.items():
            assert logprob.logprob == pytest.approx(float(row[each]), abs=1e-4)
            assert logprob.rank == 1 + int((row > row[each]).sum())
    total = sum(float(row[token_id]) for token_id, row in zip(completion.token_ids, expected, strict=False))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("settings", [{"logprobs_mode": "raw_logits"}, {"max_num_seqs": 2}, {"overlap": True}])
def test_prompt_logprobs_chunked_and_after_a_prefix_was_cached(
    model: TinyModel, chunk: int, settings: dict[str, Any]
) -> None:
    prompt = random_prompt(50, seed=1)
    expected = model.logits(prompt).log_softmax(-1)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=0)
    with model.llm(long_prefill_token_threshold=chunk, **settings) as llm:
        llm.generate([prompt], FREE, use_tqdm=False)
        outputs = llm.generate([prompt, prompt[:1], prompt], [params, params, FREE], use_tqdm=False)
        assert outputs[1].prompt_logprobs == [None] and outputs[2].prompt_logprobs is None
        assert outputs[0].num_cached_tokens == 0
        assert outputs[2].num_cached_tokens == 48  # other requests go on sharing
    found = outputs[0].prompt_logprobs
    assert len(found) == 50 and found[0] is None
    for token_id, row, entry in zip(prompt[1:], expected, found[1:], strict=False):
        assert entry.keys() == {token_id, *row.topk(2).indices.tolist()}
        assert entry[token_id].logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert entry[token_id].rank == 1 + int((row > row[token_id]).sum())


def test_processed_logprobs_are_of_what_is_drawn_from(model: TinyModel) -> None:
    params = SamplingParams(temperature=0.5, top_k=3, seed=1, max_tokens=5, logprobs=5, ignore_eos=True)
    prompt = random_prompt(9)
    with model.llm(logprobs_mode="processed_logprobs") as llm:
        completion = generate(llm, prompt, params).outputs[0]
    logits = model.logits(prompt + completion.token_ids)[len(prompt) - 1 :] / 0.5
    for found, row in zip(completion.logprobs, logits, strict=False):
        assert len(found) == 5 and max(found) < VOCAB_SIZE
        kept = {token_id for token_id, entry in found.items() if entry.logprob > -math.inf}
        assert kept == set(row.topk(3).indices.tolist())
        assert sum(math.exp(found[token_id].logprob) for token_id in kept) == pytest.approx(1)


# Several continuations


@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": False}, {"overlap": True}, {"num_kv_blocks": 12}])
def test_continuations_share_the_prompts_blocks(model: TinyModel, settings: dict[str, Any]) -> None:
    prompt = random_prompt(70, seed=7)
    with model.llm(**settings) as llm:
        computed: list[int] = []
        submit = llm._executor.submit
        llm._executor.submit = lambda plan: (computed.append(plan.num_tokens), submit(plan))  # type: ignore[method-assign]
        output = generate(llm, prompt, replace(FREE, n=5, max_tokens=4))
        llm._engine.scheduler.sanity_checks()
        assert llm.get_stats().num_free_blocks == llm.get_stats().num_total_blocks
        if "num_kv_blocks" not in settings:
            # The prompt once; then each of the others what follows the 4 full blocks, which are shared.
            assert sum(computed) - (5 * 3) == 70 + 4 * 6
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 5
    with model.llm() as llm:
        assert output.outputs[0].token_ids == tokens(llm, prompt, replace(FREE, max_tokens=4))


def test_continuations_are_streamed_each_by_index(llm: LLM) -> None:
    prompts = [random_prompt(5), random_prompt(40)]
    params = [replace(FREE, n=2, max_tokens=3), replace(FREE, n=3, max_tokens=5, logprobs=1)]
    final = llm.generate(prompts, params, use_tqdm=False)
    seen: dict[str, list[Any]] = {"0": [], "1": []}
    for output in llm.generate_stream(prompts, params):
        seen[output.request_id].append(output)
    for i, (request_id, shown) in enumerate(seen.items()):
        assert [output.finished for output in shown] == [False] * (len(shown) - 1) + [True], request_id
        lengths = [[len(completion.token_ids) for completion in output.outputs] for output in shown]
        for before, after in pairwise(lengths):  # a step brings each of them one token at most
            assert {b - a for a, b in zip(before, after, strict=True)} <= {0, 1} and before != after
        for ours, theirs in zip(shown[-1].outputs, final[i].outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.logprobs is None) == (theirs.logprobs is None) == (i == 0)
            for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                assert list(one) == list(other)
                for logprob, same in zip(one.values(), other.values(), strict=True):
                    close = pytest.approx(same.logprob, abs=1e-5)  # to a rounding: the prompts are in the cache by now
                    assert logprob == msgspec.structs.replace(same, logprob=close)


def test_one_continuation_may_be_aborted(llm: LLM) -> None:
    sequences = llm._engine.make_sequences(random_prompt(20), replace(FREE, n=2))
    for sequence in sequences:
        llm._engine.add(sequence)
    llm._engine.abort(sequences[0].request_id)
    while llm._engine.has_unfinished:
        llm._engine.step()
    assert sequences[1].num_output_tokens == 24


def test_several_continuations_without_a_seed_differ_from_each_other(llm: LLM) -> None:
    output = generate(llm, random_prompt(20), SamplingParams(n=8, max_tokens=8, ignore_eos=True))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 8


# What is refused

BAD: list[tuple[dict[str, Any], str]] = [
    *(({"temperature": value}, "temperature") for value in (math.nan, math.inf, -1)),
    *(({"top_p": value}, "top_p") for value in (0, 1.1, math.nan)),
    *(({"top_k": value}, "top_k") for value in (-2, 1.5)),
    ({"min_p": 1.01}, "min_p"),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, math.inf)),
    *(({"presence_penalty": value}, "presence_penalty") for value in (-2.1, "x")),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    *(({"n": value}, "n must") for value in (0, 1_000_000_000, None)),
    *(({"seed": value}, "seed") for value in (2**63, -(2**63) - 1, 0.5)),
    *(({"logprobs": value}, "logprobs") for value in (-2, True)),
    ({"prompt_logprobs": "1"}, "prompt_logprobs"),
    *(({"logit_bias": value}, "logit_bias") for value in ({-1: 0}, {2**63: 0}, {5: 101}, {5: math.nan}, {"x": 1}, [5])),
    *(({"allowed_token_ids": value}, "allowed_token_ids") for value in ([], [-1], [2**63], "5")),
    *(({"stop_token_ids": value}, "stop_token_ids") for value in ([-1], [2**63], [True])),
    *(({"bad_words": value}, "bad_words") for value in ("", [" "], [5])),
    *(({"stop": value}, "stop") for value in ("", [""])),
    ({"min_tokens": 17}, "min_tokens"),
    ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens"),
]


@pytest.mark.parametrize(("settings", "name"), BAD, ids=str)
def test_bad_values_are_refused_by_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logprobs": 21}, r"logprobs must be from 0 to 20, got 21: LLM\(max_logprobs=…\) raises that"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be from 0 to 20"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids must be from 0 to 299, got 300"),
        ({"allowed_token_ids": [3, VOCAB_SIZE]}, "allowed_token_ids must be from 0 to 299, got 300"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias token ids must be from 0 to 299, got 300"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "no token is left"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
        ({"stop": "x"}, "stop needs a tokenizer"),
    ],
)
def test_what_the_model_cannot_do_is_refused_by_name(llm: LLM, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[1, 2]], SamplingParams(**settings), use_tqdm=False)
    assert tokens(llm, random_prompt(9), replace(FREE, max_tokens=2))


def test_too_many_bans_and_biases_are_refused_by_name(tiny: Any, lettered: LLM) -> None:
    with tiny("qwen3", vocab_size=4000).llm() as llm:
        with pytest.raises(ValueError, match="may single out 1022 tokens, got 3000"):
            llm.generate([[1, 2]], SamplingParams(logit_bias=dict.fromkeys(range(3000), 1.0)), use_tqdm=False)
        outputs = llm.generate([[1, 2]], SamplingParams(logit_bias=dict.fromkeys(range(1022), 100.0)), use_tqdm=False)
        assert max(outputs[0].outputs[0].token_ids) < 1022
        outputs = llm.generate([[1, 2]], SamplingParams(allowed_token_ids=list(range(3000))), use_tqdm=False)
        assert max(outputs[0].outputs[0].token_ids) < 3000
        everything = SamplingParams(stop_token_ids=list(range(4000)))
        assert len(tokens(llm, [1, 2], everything)) == 1
    for name in ("bad_words", "stop"):
        with pytest.raises(ValueError, match=f"{name} has half a surrogate pair"):
            SamplingParams(**{name: ["\ud800"]})
    with pytest.raises(ValueError, match="bad_words may have 128 of more than one token"):
        lettered.generate([[1, 2]], SamplingParams(bad_words=[chr(i) + "a" for i in range(40, 200)]), use_tqdm=False)
    with pytest.raises(ValueError, match="each of bad_words may have 16 tokens, got one of 17"):
        lettered.generate([[1, 2]], SamplingParams(bad_words=["a" * 17]), use_tqdm=False)


def test_odd_values_have_their_documented_meaning(llm: LLM) -> None:
    prompt = random_prompt(12)
    greedy = tokens(llm, prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    free = replace(FREE, max_tokens=8)
    for params in (replace(free, temperature=1e-20), replace(free, top_k=1), replace(free, min_p=1.0)):
        assert tokens(llm, prompt, params) == greedy
    for same in ({"top_k": -1}, {"top_k": VOCAB_SIZE + 1}, {"top_p": 1}, {"logit_bias": None}, {"seed": 5}):
        assert tokens(llm, prompt, replace(free, **same)) == tokens(llm, prompt, free)
    two = llm.generate([prompt, prompt], free, use_tqdm=False)
    assert two[0].outputs[0].token_ids == two[1].outputs[0].token_ids


def test_every_seed_is_its_own_and_none_is_a_new_one_each_time(llm: LLM) -> None:
    seeds = [0, 1, -1, 2**32, -(2**63), 2**63 - 1, None, None]
    params = [replace(FREE, seed=seed, max_tokens=8) for seed in seeds]
    first, again = (
        [output.outputs[0].token_ids for output in llm.generate([[5, 6]] * len(seeds), params, use_tqdm=False)]
        for _ in range(2)
    )
    assert first[:-2] == again[:-2]
    assert len(set(map(tuple, first + again[-2:]))) == len(seeds) + 2


# Defaults


def test_defaults_come_from_generation_config_unless_switched_off(tiny: Any, tmp_path: Any) -> None:
    model = TinyModel(tmp_path, model_type="qwen3", num_attention_heads=4, num_key_value_heads=2)
    config = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, max_new_tokens=5
    )
    config.save_pretrained(tmp_path)
    with model.llm() as llm:
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1, max_tokens=5
        )
        assert len(generate(llm, [5, 6, 7], None).outputs[0].token_ids) <= 5  # type: ignore[arg-type]
    with model.llm(generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    config.top_p = 3.0
    (tmp_path / "generation_config.json").write_text(config.to_json_string())
    with model.llm() as llm, pytest.raises(ValueError, match=r"generation_config\.json: top_p"):
        generate(llm, [5, 6, 7], None)  # type: ignore[arg-type]


def test_the_readme_lists_every_parameter_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", README.read_text(), re.MULTILINE)
    defaults = {field.name: repr(getattr(SamplingParams(), field.name)) for field in fields(SamplingParams)}
    assert dict(rows) == defaults


def test_the_readme_lists_the_ranges_that_are_accepted() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `.+?` \| (−?[\d.]+) to (−?[\d.]+) \|", README.read_text(), re.MULTILINE)
    assert len(rows) >= 6
    for name, *limits in rows:
        low, high = (float(limit.replace("−", "-")) for limit in limits)
        kind = type(getattr(SamplingParams(), name)) if name != "logit_bias" else lambda bias: {5: float(bias)}
        SamplingParams(**{name: kind(low)})
        SamplingParams(**{name: kind(high)})
        for beyond in (low - 1 if kind is int else low - 0.001, high + 1 if kind is int else high + 0.001):
            with pytest.raises(ValueError, match=name):
                SamplingParams(**{name: kind(beyond)})


# Access to the model


def shape_of_the_head(model: Any) -> list[int]:
    return list(model.lm_head.weight.shape)


def test_a_function_is_applied_to_the_model_of_every_rank(model: TinyModel, llm: LLM) -> None:
    assert llm.apply_model(shape_of_the_head) == [[384, 64]]
    with pytest.raises(ValueError, match="must be importable"):
        llm.apply_model(lambda model: None)
    with pytest.raises(ValueError, match="must be importable, at the top level of a module; None is not"):
        llm.apply_model(None)  # type: ignore[arg-type]
    with model.llm(tensor_parallel_size=2) as two:
        two.generate([[1, 2, 3]], FREE, use_tqdm=False)
        assert two.apply_model(shape_of_the_head) == [[256, 64]] * 2
        assert tokens(two, [1, 2, 3], FREE) == tokens(llm, [1, 2, 3], FREE)
