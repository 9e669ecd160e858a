"""What runs in the next step: order, limits, admission, preemption, and what may be freed when."""

import random
from array import array
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from nanollm.config import EngineConfig
from nanollm.engine import engine_core, scheduler
from nanollm.engine.block_manager import BlockManager
from nanollm.engine.scheduler import OutOfBlocks, Scheduler, Step
from nanollm.engine.sequence import Sequence
from nanollm.outputs import EngineOutput
from nanollm.runtime.step_plan import StepResult
from nanollm.sampling_params import NUM_PARAMS, SamplingParams
from tests.engine.simulation import Engine, params_words


class Run:
    """A scheduler, and a device that samples token 9 in every row when told to."""

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4, max_model_len: int = 1000, **config: Any) -> None:
        self.scheduler = Scheduler(EngineConfig("none", block_size=block_size, **config), num_blocks, max_model_len)
        self._ids = count()

    def add(self, tokens: list[int] | range, *, max_tokens: int | None = None, **kwargs: Any) -> Sequence:
        stop_token_ids = kwargs.pop("stop_token_ids", [])
        params = SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=stop_token_ids)
        max_model_len = self.scheduler.max_model_len
        seq = Sequence(next(self._ids), array("i", tokens), params, seed=0, max_model_len=max_model_len, **kwargs)
        self.scheduler.add(seq)
        return seq

    def schedule(self) -> Step:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.sanity_checks()
        return step

    def finish(self, step: Step, token: int = 9) -> list[EngineOutput]:
        outputs = self.scheduler.update(step, StepResult([token] * len(step.sampled)), now=0.0)
        self.scheduler.sanity_checks()
        return outputs

    def step(self) -> list[tuple[int, int]]:
        """Plan and finish one step; returns (request id, tokens computed) in the order of the plan."""
        step = self.schedule()
        self.finish(step)
        return planned(step)

    def free_blocks(self) -> list[int]:
        return self.scheduler.block_manager._free.ids()


def planned(step: Step) -> list[tuple[int, int]]:
    return [(seq.request_id, n) for seq, n in zip(step.sequences, step.plan.num_new_B.tolist(), strict=True)]


# What a step may hold


def test_decodes_come_first_then_prompts_in_order_of_arrival() -> None:
    run = Run(max_num_batched_tokens=8)
    run.add(range(3))
    run.add(range(30, 39))
    assert run.step() == [(0, 3), (1, 5)]
    run.add(range(60, 70))
    assert run.step() == [(0, 1), (1, 4), (2, 3)]
    assert run.step() == [(0, 1), (1, 1), (2, 6)]
    assert run.step() == [(0, 1), (1, 1), (2, 1)]
    assert run.step() == [(0, 1), (1, 1), (2, 1)]


def test_a_prompt_larger_than_the_token_budget_is_cut_over_several_steps() -> None:
    run = Run(max_num_batched_tokens=4)
    run.add(range(10))
    run.add(range(20, 22))
    assert [run.step() for _ in range(4)] == [[(0, 4)], [(0, 4)], [(0, 2), (1, 2)], [(0, 1), (1, 1)]]


def test_a_long_prompt_takes_no_more_than_the_threshold_of_a_step() -> None:
    run = Run(max_num_batched_tokens=16, long_prefill_token_threshold=5)
    run.add(range(12))
    run.add(range(20, 27))
    assert [run.step() for _ in range(3)] == [[(0, 5), (1, 5)], [(0, 5), (1, 2)], [(1, 1), (0, 2)]]


def test_two_prompts_cut_at_once_go_on_in_order() -> None:
    run = Run(max_num_batched_tokens=8, long_prefill_token_threshold=6)
    run.add(range(14))
    run.add(range(20, 30))
    assert [run.step() for _ in range(4)] == [
        [(0, 6), (1, 2)], [(0, 6), (1, 2)], [(0, 2), (1, 6)], [(0, 1), (1, 1)],
    ]  # fmt: skip


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 100, 500])
def test_as_many_sequences_run_as_are_allowed(max_num_seqs: int) -> None:
    run = Run(num_blocks=1200, max_num_seqs=max_num_seqs)
    for i in range(max_num_seqs + 2):
        run.add([i, i, i], max_tokens=3)
    rounds = [len(run.step()) for _ in range(6)]
    rest = min(2, max_num_seqs)
    assert rounds == [max_num_seqs] * 3 + [rest] * 3
    assert run.scheduler.has_unfinished == (max_num_seqs == 1)  # its third one is still to come


def test_no_more_sequences_run_than_a_step_has_tokens() -> None:
    run = Run(max_num_seqs=100, max_num_batched_tokens=3)
    for i in range(8):
        run.add([i], max_tokens=2)
    assert [run.step() for _ in range(4)] == [
        [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)], [(3, 1), (4, 1), (5, 1)], [(3, 1), (4, 1), (5, 1)],
    ]  # fmt: skip


def test_a_length_limit_that_is_known_is_never_planned_past() -> None:
    run = Run()
    seq = run.add(range(5), max_tokens=2)
    first, second = run.schedule(), run.schedule()
    assert run.scheduler.schedule() is None  # the second token is on its way, and it is the last
    run.finish(first)
    assert run.scheduler.schedule() is None
    (output,) = run.finish(second)
    assert (output.finish_reason, seq.token_ids.tolist()) == ("length", [*range(5), 9, 9])
    assert not run.scheduler.has_unfinished


# The plan itself


def test_every_array_of_the_plans_of_two_prompts() -> None:
    scheduler = Scheduler(EngineConfig("none", block_size=4, max_num_batched_tokens=8), num_blocks=8, max_model_len=99)

    def request(request_id: int, tokens: list[int], temperature: float, seed: int) -> Sequence:
        params = SamplingParams(temperature=temperature, max_tokens=9)
        return Sequence(request_id, array("i", tokens), params, seed=seed, max_model_len=99)

    scheduler.add(request(0, [10, 11, 12], 0.5, -2))
    scheduler.add(request(1, list(range(20, 30)), 0.0, 2**40 + 7))

    def arrays() -> dict[str, Any]:
        step = scheduler.schedule()
        assert step is not None
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(step.plan).items() if k != "params"} | {
            "params": step.plan.params.reshape(-1, NUM_PARAMS).tolist()
        }

    assert arrays() == {
        "step": 0,
        "row_ids_B": [0, 1],
        "num_new_B": [3, 5],  # the first prompt whole, the second as far as the budget of 8 goes
        "num_computed_B": [0, 0],
        "on_device_B": [0, 0],
        "host_tokens": [10, 11, 12, 20, 21, 22, 23, 24],
        "append_rows": [0, 1],
        "append_starts": [0, 0],
        "append_counts": [1, 3],  # the blocks of whole prompts
        "append_blocks": [0, 1, 2, 3],
        "logit_rows_L": [2],
        "sampled_rows_S": [0],
        "params_rows": [0, 1],
        # Temperature as float32, seed low and high, choice; top_k, top_p, min_p; three penalties; no rules.
        "params": [
            [0x3F000000, -2, -1, 0, 0, 0x3F800000, 0, 0x3F800000, 0, 0, 0],
            [0, 7, 256, 0, 0, 0x3F800000, 0, 0x3F800000, 0, 0, 0],
        ],
        "rules": [],
        "num_logprobs_L": [],
        "targets": [],
        "masked": [],
        "processed": [],
    }
    assert arrays() == {
        "step": 1,
        "row_ids_B": [0, 1],
        "num_new_B": [1, 5],
        "num_computed_B": [3, 5],
        "on_device_B": [1, 0],  # nobody has read the first row's token yet
        "host_tokens": [25, 26, 27, 28, 29],
        "append_rows": [],
        "append_starts": [],
        "append_counts": [],
        "append_blocks": [],
        "logit_rows_L": [0, 5],
        "sampled_rows_S": [0, 1],
        "params_rows": [],
        "params": [],
        "rules": [],
        "num_logprobs_L": [],
        "targets": [],
        "masked": [],
        "processed": [],
    }
    assert arrays() == {
        "step": 2,
        "row_ids_B": [0, 1],
        "num_new_B": [1, 1],
        "num_computed_B": [4, 10],
        "on_device_B": [1, 1],
        "host_tokens": [],
        "append_rows": [0],
        "append_starts": [1],
        "append_counts": [1],
        "append_blocks": [4],
        "logit_rows_L": [0, 1],
        "sampled_rows_S": [0, 1],
        "params_rows": [],
        "params": [],
        "rules": [],
        "num_logprobs_L": [],
        "targets": [],
        "masked": [],
        "processed": [],
    }


def test_logits_of_all_positions_follow_those_to_sample_from() -> None:
    run = Run(max_num_batched_tokens=8)
    run.add(range(3), all_logits=True)
    run.add(range(20, 22))
    step = run.schedule()
    assert step.plan.logit_rows_L.tolist() == [2, 4, 0, 1, 2]
    assert [(seq.request_id, n) for seq, n in step.logit_spans] == [(0, 3)]


def test_prompts_get_no_more_logits_in_a_step_than_there_are_rows() -> None:
    run = Run(max_num_seqs=2)
    run.add(range(3), all_logits=True, max_tokens=1)
    run.add(range(20, 22), all_logits=True, max_tokens=1)
    assert [planned(run.schedule()) for _ in range(3)] == [[(0, 2)], [(0, 1), (1, 1)], [(1, 1)]]


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.7, -1), (100.0, 2**63 - 1), (1.0, -(2**63))])
def test_sampling_parameters_travel_as_words(temperature: float, seed: int) -> None:
    engine = Engine()
    engine.add([1, 2], temperature=temperature, seed=seed)
    engine.step()
    assert tuple(engine.executor.plans[0].params.tolist()) == params_words(temperature, seed)


# Admission


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    run = Run(num_blocks=6)
    run.add(range(8))
    run.add(range(20, 28))
    run.add(range(30, 31))
    assert run.step() == [(0, 8), (1, 8)]  # 2 of 6 blocks are left, for the 2 that run
    assert run.scheduler.waiting.keys() == {2}


def test_admission_counts_hits_that_come_out_of_the_free_list() -> None:
    run = Run(num_blocks=5)
    run.add(range(8), max_tokens=1)
    run.step()
    run.add(range(50, 58))
    assert run.step() == [(1, 8)]  # 3 of 5 blocks are free; the prompt below finds 2 of them and needs 1 more
    blocked = run.add(range(11))
    assert run.step() == [(1, 1)] and blocked.request_id in run.scheduler.waiting
    run.scheduler.abort(1)
    assert run.step() == [(2, 3)]


def test_nobody_passes_a_prompt_that_does_not_fit_yet() -> None:
    run = Run(num_blocks=4)
    run.add(range(5), max_tokens=4)
    run.add(range(20, 33))  # 4 blocks
    run.add(range(40, 41))  # 1 block, which there is
    assert [run.step() for _ in range(5)] == [[(0, 5)], [(0, 1)], [(0, 1)], [(0, 1)], [(1, 13)]]


def test_a_blocked_prompt_starts_as_soon_as_a_running_one_has_computed_what_it_can_share() -> None:
    run = Run(num_blocks=10, max_num_batched_tokens=16)
    shared = list(range(24))
    run.add([*shared, 30])  # 7 blocks; 3 are left, 1 of them kept free
    run.add([*shared, 31])  # 7 blocks, of which it shares 6
    assert [run.step() for _ in range(3)] == [[(0, 16)], [(0, 9)], [(0, 1), (1, 1)]]


def test_a_blocked_prompt_starts_when_one_less_runs_though_no_block_more_is_free() -> None:
    run = Run(num_blocks=7)
    run.add([1], max_tokens=2)
    run.add([2, 2, 2, 2], max_tokens=9)
    run.add(range(20, 36))  # 4 blocks
    run.add([3])
    assert run.step() == [(0, 1), (1, 4)]
    # 5 blocks are free, 2 of them are kept: one too few. Then the first ends and the second takes a block.
    assert run.step() == [(0, 1), (1, 1)]
    assert run.step() == [(1, 1), (2, 16)]


@pytest.mark.parametrize(("length", "fits"), [(31, True), (32, True), (33, False), (5000, False)])
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(length: int, fits: bool) -> None:
    run = Run(num_blocks=8)
    if fits:
        run.add([1] * length)
        return
    message = f"prompt has {length} tokens, but " + ("the KV cache holds 32" if length < 1000 else "max_model_len is")
    with pytest.raises(ValueError, match=message):
        run.add([1] * length)
    assert not run.scheduler.has_unfinished and run.scheduler.num_tokens_in == 0


# Preemption


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    run = Run(num_blocks=4)
    old = run.add(range(4), max_tokens=7)
    new = run.add(range(20, 24), max_tokens=8)
    run.add(range(40, 44))
    assert run.step() == [(0, 4), (1, 4)]
    for _ in range(4):
        assert run.step() == [(0, 1), (1, 1)]
    assert run.step() == [(0, 1)]  # it needs a third block
    assert list(run.scheduler.waiting) == [1, 2] and run.scheduler.num_preemptions == 1
    assert (new.row, new.block_ids, new.num_computed_tokens) == (-1, [], 0)
    while old.finish_reason is None:
        run.step()
    assert run.step()[0] == (1, 5)  # it finds its first block, which was not needed, and computes the rest anew
    assert new.num_cached_tokens == 0  # the request was not served from the cache, though


def test_the_newest_preempts_itself() -> None:
    run = Run(num_blocks=3)
    run.add(range(4), max_tokens=8)
    run.add(range(20, 24))
    run.step()
    assert run.step() == [(0, 1)]
    assert list(run.scheduler.running) == [0] and list(run.scheduler.waiting) == [1]


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    run = Run(num_blocks=6)
    old = run.add(range(4), max_tokens=9)
    new = run.add(range(20, 32))
    run.step()
    while new.row >= 0:
        run.step()
    assert old.row >= 0 and new.num_output_tokens > 0
    while old.finish_reason is None:
        run.step()
    step = run.schedule()
    (computed,) = step.plan.num_computed_B.tolist()
    assert planned(step) == [(1, new.num_tokens - 1 - computed)] and computed >= 8
    assert step.plan.host_tokens.tolist() == new.token_ids.tolist()[computed:]


def test_a_sequence_in_flight_is_never_preempted() -> None:
    run = Run(num_blocks=3)
    sequences = [run.add(range(3), max_tokens=20), run.add(range(20, 23))]
    steps = [run.schedule(), run.schedule()]
    for step in steps:
        # The first takes the last block for its next token; there is none for the second.
        with pytest.raises(OutOfBlocks):
            run.scheduler.schedule()
        run.scheduler.sanity_checks()
        assert [len(seq.block_ids) for seq in sequences] == [2, 1] and len(run.scheduler.running) == 2
        run.finish(step)
    assert run.step() == [(0, 1)]
    assert run.scheduler.num_preemptions == 1


def test_one_that_outgrows_the_cache_alone_ends_with_length() -> None:
    run = Run(num_blocks=2)
    seq = run.add(range(5))
    while run.scheduler.has_unfinished:
        run.step()
    assert seq.finish_reason == "length" and len(seq.token_ids) == 9  # the last token needs no place in the cache
    assert run.scheduler.num_preemptions == 0 and len(run.free_blocks()) == 2


# Finishing and aborting while steps are in flight


def test_blocks_and_row_of_a_sequence_found_finished_late_stay_until_its_last_step_is_done() -> None:
    run = Run(num_blocks=4, max_num_seqs=1)
    seq = run.add(range(6), stop_token_ids=[9])
    following = run.add(range(20, 22))
    first, second = run.schedule(), run.schedule()
    (output,) = run.finish(first)
    assert output.finish_reason == "stop" and not run.scheduler.running
    assert (seq.row, seq.block_ids, run.free_blocks()) == (0, [0, 1], [2, 3])
    assert run.scheduler.schedule() is None  # the only row is still in use
    assert run.finish(second) == []  # a surplus token, dropped
    assert seq.token_ids.tolist() == [*range(6), 9]
    assert (seq.row, run.free_blocks()) == (-1, [1, 2, 3, 0])
    assert run.step() == [(following.request_id, 2)]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_abort_in_flight_is_a_mark_and_the_free_comes_when_the_steps_are_done(num_in_flight: int) -> None:
    run = Run(num_blocks=4)
    seq = run.add(range(6))
    steps = [run.schedule() for _ in range(num_in_flight)]
    assert run.scheduler.abort(0) and not run.scheduler.has_unfinished
    assert not run.scheduler.abort(0)
    for step in steps:
        assert len(run.free_blocks()) == 2
        assert run.finish(step) == []
    assert (len(run.free_blocks()), seq.finish_reason, seq.num_output_tokens) == (4, "abort", 0)
    assert not run.scheduler.abort(0)


def test_abort_of_a_waiting_a_running_a_preempted_and_a_finishing_sequence_twice() -> None:
    run = Run(num_blocks=4, max_num_seqs=2)
    run.add(range(4))
    run.add(range(20, 24), stop_token_ids=[9])
    run.add(range(40, 44))
    assert run.scheduler.abort(2) and not run.scheduler.abort(2)  # waiting
    steps = [run.schedule(), run.schedule()]
    run.finish(steps[0])
    assert not run.scheduler.abort(1)  # has just finished, one step too late
    run.finish(steps[1])
    preempted = run.add(range(60, 64))
    while preempted.request_id not in run.scheduler.waiting or not run.scheduler.num_preemptions:
        run.step()
    assert run.scheduler.abort(3) and not run.scheduler.abort(3)
    run.step()
    assert run.scheduler.abort(0) and not run.scheduler.abort(0)  # running, nothing in flight: freed at once
    assert len(run.free_blocks()) == 4 and not run.scheduler.has_unfinished
    assert not run.scheduler.abort(12345)


def test_a_prefix_is_hit_while_the_step_that_computes_it_is_in_flight() -> None:
    run = Run()
    run.add(range(10))
    first = run.schedule()
    run.add(range(10))
    second = run.schedule()
    assert planned(second) == [(0, 1), (1, 2)]
    assert second.plan.num_computed_B.tolist() == [10, 8]
    assert second.plan.append_blocks.tolist() == [0, 1, 3]  # two shared ones; the last is its own
    run.finish(first)
    run.finish(second)


@pytest.mark.parametrize(("num_read", "hits"), [(1, 4), (2, 8)])
def test_a_block_of_sampled_tokens_is_shared_only_when_they_were_read(num_read: int, hits: int) -> None:
    run = Run()
    run.add(range(6))
    steps = [run.schedule() for _ in range(3)]  # the last writes the second token, so that the second block is full
    for step in steps[:num_read]:
        run.finish(step)
    run.add([*range(6), 9, 9, 1])
    assert run.schedule().plan.num_computed_B.tolist() == [8, hits]


def test_an_aborted_prompt_leaves_what_it_computed_to_others() -> None:
    run = Run(max_num_batched_tokens=8)
    run.add(range(20))
    step = run.schedule()
    run.scheduler.abort(0)
    run.finish(step)
    run.add(range(20))
    assert run.schedule().plan.num_computed_B.tolist() == [8]


# For ever


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [4, 16])
def test_every_running_sequence_decodes_in_every_step_while_prompts_keep_arriving(overlap: bool, budget: int) -> None:
    engine = Engine(num_blocks=400, max_num_batched_tokens=budget, max_num_seqs=6, overlap=overlap)
    numbers = random.Random(0)
    for _ in range(250):
        for _ in range(2):
            engine.add([numbers.randrange(50) for _ in range(numbers.randint(1, 30))], max_tokens=10)
        decoding = [i for i in engine.scheduler.running if engine.tokens[i]]
        gained = {output.request_id for output in engine.step()}
        assert gained.issuperset(decoding)
    finished = [i for i, output in engine.outputs.items() if output.finish_reason]
    assert len(finished) > 30 and max(finished) < len(finished) + 12  # nobody was left behind
    for i in finished:
        engine.check_result(i)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_oldest_always_gets_on_when_the_cache_is_far_too_small(overlap: bool) -> None:
    engine = Engine(num_blocks=9, max_num_batched_tokens=16, max_num_seqs=6, overlap=overlap)
    numbers = random.Random(1)
    for _ in range(250):
        engine.add([numbers.randrange(50) for _ in range(numbers.randint(1, 20))], max_tokens=16)
        oldest = min(engine.scheduler.running, default=None)
        outputs = engine.step()
        if oldest is not None and engine.tokens[oldest]:
            assert oldest in [output.request_id for output in outputs]
    assert engine.core.get_stats().num_preemptions > 10
    finished = [i for i, output in engine.outputs.items() if output.finish_reason]
    assert len(finished) > 20 and max(finished) < len(finished) + 6
    for i in finished:
        engine.check_result(i)


def test_the_same_requests_give_the_same_plans_again() -> None:
    def plans() -> list[list[int]]:
        # Block hashes are seeded anew in each cache, so an order taken from a hash would show.
        engine = Engine(num_blocks=12, max_num_batched_tokens=8, max_num_seqs=4, overlap=True)
        numbers = random.Random(2)
        for _ in range(30):
            engine.add([numbers.randrange(2) for _ in range(numbers.randint(1, 16))], max_tokens=9)
            engine.step()
        engine.run()
        return [plan.pack().tolist() for plan in engine.executor.plans]

    assert plans() == plans()


# Several continuations of a prompt, and what is wanted of its tokens


def test_sequences_with_rules_run_in_the_first_rows_only_and_the_others_leave_them_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MAX_RULED_ROWS", 2)
    engine = Engine(max_num_seqs=5, num_blocks=200)
    penalty = {"presence_penalty": 1.0}
    kinds: list[dict[str, float]] = [{}, {}, {}, penalty, {}, penalty, {}, penalty, penalty]
    ids = [engine.add([i], max_tokens=20, ignore_eos=True, **kind) for i, kind in enumerate(kinds)]
    engine.step()
    rows = [engine.sequences[i].row for i in ids]
    assert sorted(rows[:3]) == [2, 3, 4]  # the others' rows, as long as there are any
    assert (rows[3:5], rows[5:]) == ([0, 1], [-1] * 4)  # the fifth has taken one, so the next with rules waits
    while engine.core.has_unfinished:
        engine.step()  # checks where they are
    assert all(len(engine.tokens[i]) == 20 for i in ids)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_continuations_wait_for_the_first_to_plan_the_prompt_and_then_share_it(caching: bool, overlap: bool) -> None:
    engine = Engine(overlap=overlap, max_num_batched_tokens=8, enable_prefix_caching=caching)
    settings = SamplingParams(n=3, temperature=0, seed=0, max_tokens=5, ignore_eos=True)
    sequences = engine.core.make_sequences(list(range(14)), settings)
    assert [seq.choice for seq in sequences] == [0, 1, 2] and len({seq.seed for seq in sequences}) == 1
    for seq in sequences:
        engine.sequences[seq.request_id], engine.tokens[seq.request_id] = seq, []
        engine.core.add(seq)
    engine.step()
    assert [plan.num_new_B.tolist() for plan in engine.executor.plans[:2]] == [[8], [6]][: len(engine.executor.plans)]
    engine.run()
    computed = sum(plan.num_tokens for plan in engine.executor.plans)
    assert computed == 14 + 2 * 2 + 3 * 4  # the prompt; of the others what no full block has; tokens after the first
    # Each has noise of its own: here, other tokens.
    assert len({tuple(engine.tokens[seq.request_id]) for seq in sequences}) == 3
    engine.check_result(sequences[0].request_id)


def test_continuations_are_validated_once_and_their_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: calls.update([name]) or function(*args))

    counted(engine_core, "check_token_ids")
    counted(engine_core, "check_rules")
    counted(BlockManager, "_hash")
    engine = Engine(block_size=4)
    settings = SamplingParams(n=50, temperature=0, seed=0, max_tokens=1)
    sequences = engine.core.make_sequences(list(range(17)), settings)
    for seq in sequences:
        engine.core.add(seq)
    while engine.core.has_unfinished:
        engine.core.step()
    assert calls == {"check_token_ids": 1, "check_rules": 1, "_hash": 4}
    assert [seq.request_id for seq in sequences] == list(range(50))
    assert all(seq.num_output_tokens == 1 for seq in sequences)


def test_the_others_go_on_when_the_first_continuation_is_aborted_before_it_runs() -> None:
    engine = Engine()
    sequences = engine.core.make_sequences([1, 2, 3], SamplingParams(n=2, temperature=0, seed=0, max_tokens=4))
    for seq in sequences:
        engine.core.add(seq)
    assert engine.core.abort(sequences[0].request_id)
    while engine.core.has_unfinished:
        engine.core.step()
    assert sequences[1].num_output_tokens == 4


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_of_every_token_but_the_first_whatever_the_chunks(overlap: bool) -> None:
    engine = Engine(overlap=overlap, num_blocks=8, max_num_batched_tokens=7, max_num_seqs=3)
    prompts = [list(range(17)), list(range(17)), [4], list(range(9))]
    ids = [engine.add(prompt, prompt_logprobs=0, logprobs=0, max_tokens=6, ignore_eos=True) for prompt in prompts]
    first: dict[int, EngineOutput] = {}
    logprobs: dict[int, list[float]] = {i: [] for i in ids}
    while engine.core.has_unfinished:
        for output in engine.step():
            first.setdefault(output.request_id, output)
            logprobs[output.request_id] += [found.logprob for found in output.logprobs]
    for i, prompt in zip(ids, prompts, strict=True):
        *_, kv = engine.alone(i)
        found = first[i].prompt_logprobs
        assert [token.rank for token in found] == prompt[1:]  # the simulated device says which token it was asked for
        assert [token.logprob for token in found] == [float(x) for x in kv[: len(prompt) - 1]]
        assert logprobs[i] == [float(x) for x in kv[len(prompt) - 1 :]]
        assert first[i].num_cached_tokens == 0
        engine.check_result(i)


def test_a_token_against_the_mask_ends_its_own_sequence_and_counts() -> None:
    run = Run()
    seq, other = run.add(range(5)), run.add(range(9))
    seq.matcher = SimpleNamespace(accept_token=lambda token_id: False)
    first, _ = run.finish(run.schedule(), token=7)
    assert (first.finish_reason, first.stop_reason, first.new_token_ids) == ("error", None, [7])
    assert run.scheduler.num_tokens_out == 2 and other.finish_reason is None


def test_a_token_below_zero_ends_its_sequence_with_an_error() -> None:
    run = Run()
    seq = run.add(range(5))
    step, surplus = run.schedule(), run.schedule()
    (output,) = run.finish(step, token=-1)
    assert (output.finish_reason, output.new_token_ids, seq.num_output_tokens) == ("error", [], 0)
    assert "NaN weights" in output.stop_reason
    assert run.scheduler.num_tokens_out == 0
    assert run.finish(surplus) == [] and not run.scheduler.has_unfinished
    assert len(run.free_blocks()) == 64
