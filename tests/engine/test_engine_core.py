"""The two-deep loop on a simulated device: whatever happens meanwhile, each request gets the tokens it gets alone."""

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import nanollm.engine
from nanollm.engine.block_manager import BlockManager
from nanollm.runtime.step_plan import StepResult
from tests.engine.line_count import count_lines
from tests.engine.simulation import COLLIDING_HASHES, Engine, machine_settings

both = pytest.mark.parametrize("overlap", [False, True])


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens below 50, other ones for another seed, from the first one on."""
    return [(seed + 7 * i * i + i) % 50 for i in range(length)]


def run_alone_and_check(engine: Engine, *ids: int) -> None:
    engine.run()
    for request_id in ids:
        engine.check_result(request_id)


# Prefix cache


@both
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48])
def test_a_cached_prompt_of_any_length_gives_the_tokens_of_an_uncached_one(overlap: bool, length: int) -> None:
    engine = Engine(block_size=16, overlap=overlap)
    first = engine.add(prompt(length))
    run_alone_and_check(engine, first)
    second = engine.add(prompt(length))
    run_alone_and_check(engine, first, second)
    assert engine.outputs[second].num_cached_tokens == (length - 1) // 16 * 16
    assert engine.tokens[first] == engine.tokens[second]
    uncached = Engine(block_size=16, overlap=overlap, enable_prefix_caching=False)
    for _ in range(2):
        third = uncached.add(prompt(length))
        run_alone_and_check(uncached, third)
        assert uncached.outputs[third].num_cached_tokens == 0 and uncached.tokens[third] == engine.tokens[first]
    assert (uncached.core.get_stats().prefix_queries, uncached.core.get_stats().prefix_hits) == (0, 0)


@both
def test_a_conversation_finds_its_earlier_turns(overlap: bool) -> None:
    engine = Engine(block_size=4, overlap=overlap, max_model_len=200)
    history = prompt(6)
    for turn in range(4):
        request = engine.add(history, max_tokens=9)
        run_alone_and_check(engine, request)
        # The last token of a turn is never computed, so the block that would hold it isn't full.
        assert engine.outputs[request].num_cached_tokens == (0 if turn == 0 else (len(history) - 4) // 4 * 4)
        history += engine.tokens[request] + prompt(3, seed=turn)


@both
def test_a_shared_prefix_in_one_batch_before_any_of_it_is_computed(overlap: bool) -> None:
    engine = Engine(block_size=4, overlap=overlap, max_num_batched_tokens=40)
    ids = [engine.add([*prompt(17), i]) for i in range(6)]
    run_alone_and_check(engine, *ids)
    assert engine.core.get_stats().prefix_hits >= 3 * 16  # those of later steps share


@both
@pytest.mark.parametrize("collisions", COLLIDING_HASHES)
def test_prefixes_whose_hashes_are_equal(overlap: bool, collisions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_hash", lambda self, data: COLLIDING_HASHES[collisions](data))
    engine = Engine(block_size=4, overlap=overlap)
    for length in (4, 5, 9, 17):
        ids = [engine.add(prompt(length, seed), max_tokens=12) for seed in range(3)]
        engine.run()
        ids += [engine.add(prompt(length, seed), max_tokens=12) for seed in range(3)]
        run_alone_and_check(engine, *ids)
    assert engine.core.get_stats().prefix_hits > 0 or collisions in ("all equal", "often equal")


@both
def test_a_block_freed_and_reused_is_never_found_under_its_old_prefix(overlap: bool) -> None:
    engine = Engine(num_blocks=5, block_size=4, overlap=overlap)
    ids = []
    for seed in (0, 1, 0, 2, 1, 0):
        ids.append(engine.add(prompt(14, seed), max_tokens=5))  # 5 blocks: all there are
        run_alone_and_check(engine, *ids)
    assert engine.core.get_stats().prefix_hits == 0


@both
def test_prompts_share_within_one_salt_only(overlap: bool) -> None:
    engine = Engine(overlap=overlap)
    cached = []
    for salt in ("", "a", "", "a", "b", "\ud800", "\ud800"):
        request = engine.add(prompt(9), cache_salt=salt)
        run_alone_and_check(engine, request)
        cached.append(engine.outputs[request].num_cached_tokens)
    assert cached == [0, 0, 8, 8, 0, 0, 8]


@both
def test_reset_prefix_cache_while_requests_run(overlap: bool) -> None:
    engine = Engine(overlap=overlap)
    ids = [engine.add(prompt(9), max_tokens=12)]
    engine.run()
    ids.append(engine.add(prompt(9), max_tokens=12))
    for _ in range(4):
        engine.step()
    engine.core.reset_prefix_cache()
    ids.append(engine.add(prompt(9), max_tokens=12))
    run_alone_and_check(engine, *ids)
    assert [engine.outputs[i].num_cached_tokens for i in ids] == [0, 8, 0]
    ids.append(engine.add(prompt(9), max_tokens=12))
    run_alone_and_check(engine, *ids)
    assert engine.outputs[ids[3]].num_cached_tokens == 8


# Pressure


@both
def test_a_prompt_that_can_never_fit_is_refused_and_the_others_go_on(overlap: bool) -> None:
    engine = Engine(num_blocks=3, block_size=4, overlap=overlap)
    first = engine.add(prompt(12))
    with pytest.raises(ValueError, match="prompt has 13 tokens, but the KV cache holds 12"):
        engine.add(prompt(13))
    run_alone_and_check(engine, first)
    assert len(engine.tokens[first]) == 1


@both
def test_one_that_outgrows_the_whole_cache_ends_with_length(overlap: bool) -> None:
    engine = Engine(num_blocks=3, block_size=4, overlap=overlap)
    request = engine.add(prompt(5), max_tokens=None)
    run_alone_and_check(engine, request)
    assert (len(engine.tokens[request]), engine.outputs[request].finish_reason) == (8, "length")
    assert sum(plan.num_tokens for plan in engine.executor.plans) == 12  # not one token was computed to be dropped


@both
@pytest.mark.parametrize("caching", [True, False])
def test_two_that_fit_alone_but_not_together(overlap: bool, caching: bool) -> None:
    engine = Engine(num_blocks=7, block_size=4, overlap=overlap, enable_prefix_caching=caching)
    ids = [engine.add(prompt(9, seed), max_tokens=12) for seed in (0, 1)]
    run_alone_and_check(engine, *ids)
    stats = engine.core.get_stats()
    assert stats.num_preemptions >= 1
    assert (stats.prefix_hits > 0) == caching  # the preempted one finds its own blocks
    assert [engine.outputs[i].num_cached_tokens for i in ids] == [0, 0]


@both
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 0])
@pytest.mark.parametrize("num_blocks", [6, 9])
def test_many_under_pressure_with_prompts_cut(overlap: bool, chunk: int, num_blocks: int) -> None:
    engine = Engine(
        num_blocks=num_blocks, overlap=overlap, max_num_batched_tokens=8, long_prefill_token_threshold=chunk
    )
    ids = [engine.add(prompt(length, seed), max_tokens=9) for seed in range(3) for length in (3, 4, 5, 8, 13)]
    run_alone_and_check(engine, *ids)
    assert engine.core.get_stats().num_preemptions > 0


@both
def test_all_logits_of_a_prompt_that_was_preempted_come_once(overlap: bool) -> None:
    engine = Engine(num_blocks=5, overlap=overlap, long_prefill_token_threshold=1)
    ids = [engine.add(prompt(4, 1), max_tokens=12), engine.add(prompt(12), max_tokens=1, all_logits=True)]
    run_alone_and_check(engine, *ids)
    assert engine.core.get_stats().num_preemptions == 1


@both
def test_what_a_prompt_finds_of_its_own_after_a_preemption_was_not_cached_for_it(overlap: bool) -> None:
    engine = Engine(num_blocks=5, overlap=overlap, long_prefill_token_threshold=1)
    ids = [engine.add(prompt(4, 1), max_tokens=12), engine.add(prompt(12), max_tokens=1)]
    run_alone_and_check(engine, *ids)
    stats = engine.core.get_stats()
    assert stats.num_preemptions == 1 and stats.prefix_hits > 0  # in the middle of its prompt
    assert engine.outputs[ids[1]].num_cached_tokens == 0


@both
@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 100, 500])
@pytest.mark.parametrize("budget", [2, 7, 8192])
def test_as_many_sequences_as_allowed_and_budgets_smaller_than_that(
    overlap: bool, max_num_seqs: int, budget: int
) -> None:
    engine = Engine(num_blocks=1200, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, overlap=overlap)
    num_requests = max_num_seqs if budget > 100 else min(max_num_seqs, 30)
    ids = [engine.add(prompt(3, seed), max_tokens=3) for seed in range(num_requests)]
    engine.step()
    expected = max_num_seqs if budget > 100 else min(budget // 3 + (budget % 3 > 0), max_num_seqs)
    if not overlap:
        assert engine.core.get_stats().num_running == expected
    run_alone_and_check(engine, *ids)


@both
def test_one_step_is_in_flight_while_the_next_is_planned(overlap: bool) -> None:
    engine = Engine(overlap=overlap)
    request = engine.add(prompt(5), max_tokens=4)
    in_flight = []
    while engine.core.has_unfinished:
        engine.step()
        in_flight.append((len(engine.tokens[request]), len(engine.executor.pending)))
    assert in_flight == [(1, overlap), (2, overlap), (3, overlap), (4, 0)]


# How requests end


@both
@pytest.mark.parametrize("max_tokens", [8, 9, 100, None, 2**31 - 1])
def test_generation_runs_to_the_end_of_the_context(overlap: bool, max_tokens: int | None) -> None:
    engine = Engine(max_model_len=20, overlap=overlap)
    request = engine.add(prompt(12), max_tokens=max_tokens)
    run_alone_and_check(engine, request)
    assert (len(engine.tokens[request]), engine.outputs[request].finish_reason) == (8, "length")
    with pytest.raises(ValueError, match="prompt has 20 tokens, but max_model_len is 20"):
        engine.add(prompt(20))


@both
@pytest.mark.parametrize("chunk", [0, 19])  # 19 leaves the last token alone in its step
def test_a_prompt_as_long_as_the_context_still_gives_its_logits(overlap: bool, chunk: int) -> None:
    engine = Engine(max_model_len=20, overlap=overlap, long_prefill_token_threshold=chunk)
    request = engine.add(prompt(20), all_logits=True, max_tokens=1)
    run_alone_and_check(engine, request)
    assert len(engine.tokens[request]) == 1
    with pytest.raises(ValueError, match="prompt has 21 tokens, but max_model_len is 20"):
        engine.add(prompt(21), all_logits=True)


@both
def test_eos_and_stop_tokens(overlap: bool) -> None:
    free = Engine()
    request = free.add(prompt(7), max_tokens=12)
    free.run()
    expected = free.tokens[request]
    first, later = expected[0], next(t for t in expected if t != expected[0])
    at = expected.index(later) + 1

    def finish(eos_token_ids: tuple[int, ...], **params: Any) -> tuple[list[int], Any, Any]:
        engine = Engine(overlap=overlap, eos_token_ids=eos_token_ids)
        request = engine.add(prompt(7), **({"max_tokens": 12} | params))
        run_alone_and_check(engine, request)
        output = engine.outputs[request]
        return engine.tokens[request], output.finish_reason, output.stop_reason

    assert finish((first,)) == ([first], "stop", None)  # EOS as the very first token
    assert finish((later, 0)) == finish((0, later)) == (expected[:at], "stop", None)
    assert finish((later,), max_tokens=at) == (expected[:at], "stop", None)  # EOS exactly at max_tokens
    assert finish((later,), ignore_eos=True) == (expected, "length", None)
    assert finish((first,), ignore_eos=True, stop_token_ids=[later]) == (expected[:at], "stop", later)
    assert finish((first,), ignore_eos=True, stop_token_ids=[first]) == ([first], "stop", first)
    assert finish((first,), stop_token_ids=[first]) == ([first], "stop", None)
    with pytest.raises(ValueError, match="stop_token_ids must be from 0 to 49, got 50"):
        finish((), stop_token_ids=[50])


@both
def test_abort_of_a_waiting_a_running_and_a_just_finishing_request_twice(overlap: bool) -> None:
    engine = Engine(overlap=overlap, max_num_seqs=2)
    ids = [engine.add(prompt(5, seed), max_tokens=n) for seed, n in enumerate((4, 20, 5, 5))]
    engine.step()
    assert engine.core.abort(ids[2]) and not engine.core.abort(ids[2])  # waiting
    engine.step()
    assert engine.core.abort(ids[1]) and not engine.core.abort(ids[1])  # running
    engine.check()
    while ids[0] not in engine.outputs or engine.outputs[ids[0]].finish_reason is None:
        engine.step()
    assert not engine.core.abort(ids[0]) and not engine.core.abort(ids[0])  # just finished
    run_alone_and_check(engine, ids[0], ids[3])
    assert ids[2] not in engine.outputs and len(engine.tokens[ids[1]]) <= 2
    assert not engine.core.abort(ids[3]) and not engine.core.abort(99)


@both
def test_abort_of_everything_leaves_nothing(overlap: bool) -> None:
    engine = Engine(overlap=overlap, num_blocks=6, max_num_batched_tokens=8)
    ids = [engine.add(prompt(5, seed), max_tokens=20) for seed in range(5)]
    for _ in range(4):
        engine.step()
    assert all(engine.core.abort(i) for i in ids)
    engine.check()
    while engine.core.has_unfinished:
        assert engine.step() == []
    engine.check_empty()


def test_stats_count_requests_blocks_and_tokens() -> None:
    engine = Engine(num_blocks=20, block_size=4, max_num_seqs=2)

    def stats() -> tuple[int, ...]:
        s = engine.core.get_stats()
        return s.num_running, s.num_waiting, s.num_free_blocks, s.num_tokens_in, s.num_tokens_out

    ids = [engine.add(prompt(5, seed), max_tokens=2) for seed in (0, 1, 0)]
    assert stats() == (0, 3, 20, 15, 0)
    engine.step()
    assert stats() == (2, 1, 16, 15, 2)
    engine.step()
    assert stats() == (0, 1, 20, 15, 4)
    engine.run()
    assert stats() == (0, 0, 20, 15, 6)
    assert (engine.core.get_stats().prefix_queries, engine.core.get_stats().prefix_hits) == (15, 4)
    assert engine.core.get_stats().num_total_blocks == 20 and engine.core.step() == []
    times = engine.outputs[ids[0]].metrics
    assert times is not None and times.first_scheduled_time is not None and times.finished_time is not None
    assert times.arrival_time <= times.first_scheduled_time <= times.first_token_time <= times.finished_time


# Failures


@both
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_after_a_failed_step_the_engine_is_empty_and_right(overlap: bool, where: str) -> None:
    engine = Engine(overlap=overlap, num_blocks=8)
    for seed in range(4):
        engine.add(prompt(9, seed), max_tokens=12)
    for _ in range(3):
        engine.step()
    engine.executor.fail_next = where
    with pytest.raises(RuntimeError, match=f"device failed in {where}"):
        engine.core.step()
    engine.check_empty()
    ids = [engine.add(prompt(9, seed), max_tokens=12) for seed in range(4)]
    run_alone_and_check(engine, *ids)


def test_a_scheduler_that_finds_nothing_to_run_is_an_error_and_no_endless_loop() -> None:
    engine = Engine()
    engine.add(prompt(3))
    with (
        mock.patch.object(engine.scheduler, "schedule", return_value=None),
        pytest.raises(RuntimeError, match="nothing to run"),
    ):
        engine.core.step()
    engine.check_empty()


def interrupt_at_line(call: Callable[[], Any], number: int) -> None:
    """call(), with a KeyboardInterrupt, as Ctrl-C raises it, at the number-th line of nanollm/engine that it runs."""
    folder = nanollm.engine.__path__[0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal number
        if not frame.f_code.co_filename.startswith(folder):
            return None
        number -= event == "line"
        if event == "line" and number < 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@both
@pytest.mark.parametrize("device_fails", [False, True])
def test_ctrl_c_at_any_line_of_a_step_leaves_an_engine_that_is_right(overlap: bool, device_fails: bool) -> None:
    """If the device fails too, it strikes while the engine is already being emptied, as Ctrl-C twice does."""

    def under_pressure() -> Engine:
        engine = Engine(overlap=overlap, num_blocks=4, max_num_batched_tokens=8)
        for seed, max_tokens in enumerate((5, 7, 4)):
            engine.add(prompt(4, seed), max_tokens=max_tokens)
        for _ in range(4):
            engine.step()
        engine.executor.fail_next = "collect" if device_fails else None
        return engine

    def step(engine: Engine) -> None:
        try:
            engine.core.step()
        except RuntimeError:
            assert device_fails

    num_lines = count_lines(lambda: step(under_pressure())) - count_lines(under_pressure)
    assert num_lines > 100
    for number in range(num_lines):
        engine = under_pressure()
        with pytest.raises(KeyboardInterrupt):
            interrupt_at_line(lambda engine=engine: step(engine), number)
        engine.executor.fail_next = None
        ids = [engine.add(prompt(6, seed), max_tokens=4) for seed in range(3)]
        while engine.core.has_unfinished:
            for output in engine.core.step():
                # A request of before goes on only if Ctrl-C came before anything had changed.
                engine.tokens[output.request_id] += output.new_token_ids
                engine.outputs[output.request_id] = output
        engine.check_empty()
        for i in ids:
            engine.check_result(i)


@both
@pytest.mark.parametrize("interrupted", ["step", "reset"])
@pytest.mark.parametrize("following", ["add", "step", "abort", "reset_prefix_cache"])
def test_ctrl_c_while_the_device_is_waited_for_after_ctrl_c(overlap: bool, interrupted: str, following: str) -> None:
    engine = Engine(overlap=overlap)
    first = engine.add(prompt(5), max_tokens=9)
    for _ in range(3):
        engine.step()
    engine.executor.fail_next = "collect"
    with (
        mock.patch.object(engine.executor, "discard", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        getattr(engine.core, interrupted)()
    engine.executor.fail_next = None
    if following != "add":
        result = getattr(engine.core, following)(*([first] if following == "abort" else []))
        assert not result
        engine.check_empty()
    other = engine.add(prompt(3, seed=4), max_tokens=9)  # would get tokens of the old steps
    run_alone_and_check(engine, other)


# Everything, in any order


SMALL_CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.one_of(st.integers(4, 16), st.integers(1, 3)),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_model_len": st.one_of(st.just(50), st.integers(2, 50)),
        "vocab_size": st.sampled_from([2, 3, 50]),
        "eos_token_ids": st.sampled_from([(), (1,), (0, 1)]),
        "overlap": st.booleans(),
        "max_num_batched_tokens": st.integers(1, 16),
        "long_prefill_token_threshold": st.integers(0, 5),
        "max_num_seqs": st.integers(1, 5),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come and go and things fail; whoever is left to finish must have the tokens it has alone."""

    @initialize(config=SMALL_CONFIGS, collisions=st.sampled_from([None, None, None, *COLLIDING_HASHES]))
    def start(self, config: dict[str, Any], collisions: str | None) -> None:
        hash_block = COLLIDING_HASHES[collisions] if collisions else None
        self.patch = mock.patch.object(
            BlockManager, "_hash", (lambda self, data: hash_block(data)) if hash_block else BlockManager._hash
        )
        self.patch.start()
        self.engine = Engine(**config)
        self.block_tokens = config["num_blocks"] * config["block_size"]
        self.live: set[int] = set()  # not finished, not aborted, not dropped
        self.finished: list[int] = []

    @rule(
        prefix=st.integers(0, 20),
        suffix=st.lists(st.integers(0, 1), max_size=6),
        max_tokens=st.one_of(st.integers(1, 14), st.none()),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        seed=st.integers(0, 1),
        stop_token_ids=st.sampled_from([[], [], [0], [1]]),
        ignore_eos=st.booleans(),
        all_logits=st.sampled_from([False, False, False, True]),
        cache_salt=st.sampled_from(["", "", "", "salt"]),
    )
    def add(self, prefix: int, suffix: list[int], all_logits: bool, **settings: Any) -> None:
        tokens = ([0, 1, 1] * 7)[:prefix] + suffix
        fits = 0 < len(tokens) < self.engine.executor.max_model_len + all_logits and len(tokens) <= self.block_tokens
        try:
            request_id = self.engine.add(tokens, all_logits=all_logits, **settings)
        except ValueError:
            assert not fits
        else:
            assert fits
            self.live.add(request_id)
        self.engine.check()

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                request_id = output.request_id
                assert request_id in self.live, "output of a request that ended"
                tokens = self.engine.tokens[request_id]
                assert tokens == self.engine.alone(request_id)[0][: len(tokens)]
                if output.finish_reason is not None:
                    self.live.remove(request_id)
                    self.finished.append(request_id)
                    self.engine.check_result(request_id)
            assert self.live == {*self.engine.scheduler.running, *self.engine.scheduler.waiting}

    @rule(i=st.integers(0, 30))
    def abort(self, i: int) -> None:
        request_id = i % (len(self.engine.sequences) + 1)  # one of them was never added
        assert self.engine.core.abort(request_id) == (request_id in self.live)
        assert not self.engine.core.abort(request_id)
        self.live.discard(request_id)
        self.engine.check()

    @rule()
    def the_device_gets_on(self) -> None:
        self.engine.executor.run_pending()

    @rule()
    def launch_ahead(self) -> None:
        self.engine.core.launch_ahead()
        self.engine.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.core.reset_prefix_cache()
        assert not self.engine.scheduler.block_manager._cached
        self.engine.check()

    @precondition(lambda self: self.live)
    @rule(where=st.sampled_from(["submit", "collect"]), fails_again=st.booleans())
    def fail(self, where: str, fails_again: bool) -> None:
        self.engine.executor.fail_next = where
        discard = KeyboardInterrupt if fails_again else self.engine.executor.discard
        try:
            with mock.patch.object(self.engine.executor, "discard", side_effect=discard):
                outputs = self.engine.core.step()
        except (RuntimeError, KeyboardInterrupt) as error:
            assert isinstance(error, KeyboardInterrupt) == fails_again
            self.live.clear()
            if fails_again:
                assert not self.engine.core.abort(0)  # any call puts things right
            self.engine.check_empty()
        else:
            assert where == "submit", "a step that submits nothing can't fail there"
            self.engine.executor.fail_next = None
            for output in outputs:
                self.engine.tokens[output.request_id] += output.new_token_ids
                self.engine.outputs[output.request_id] = output
                if output.finish_reason is not None:
                    self.live.remove(output.request_id)

    @rule(seed=st.integers(0, 2**32 - 1))
    def many_operations(self, seed: int) -> None:
        """Gets queues and blocks full more often than hypothesis does one operation at a time."""
        numbers = random.Random(seed)
        for _ in range(20):
            operation = numbers.random()
            if operation < 0.4:
                self.add(
                    numbers.randrange(20),
                    [numbers.randrange(2) for _ in range(numbers.randrange(4))],
                    numbers.random() < 0.1,
                    max_tokens=numbers.randint(1, 20),
                    ignore_eos=numbers.random() < 0.8,
                    stop_token_ids=[1] if numbers.random() < 0.1 else [],
                    cache_salt=numbers.choice(["", "", "salt"]),
                )
            elif operation < 0.9:
                self.step(times=1)
            elif operation < 0.95:
                self.abort(numbers.randrange(200))
            elif operation < 0.98:
                self.the_device_gets_on()
            else:
                self.reset_prefix_cache()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            expected = {*self.live}
            self.engine.run()
            for request_id in expected:
                self.engine.check_result(request_id)
        finally:
            self.patch.stop()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = machine_settings(max_examples=250, steps=30)


def test_a_result_is_taken_for_the_step_it_belongs_to() -> None:
    """A device that brings too few tokens is an error, not a shift of everybody's tokens."""
    engine = Engine()
    engine.add(prompt(3))
    engine.add(prompt(4))
    with mock.patch.object(engine.executor, "collect", return_value=StepResult([1])), pytest.raises(ValueError):
        engine.core.step()
    engine.check_empty()
