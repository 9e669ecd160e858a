"""StepPlan packs to one int32 array and back, and anything else that arrives is a ValueError."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanollm.runtime.step_plan import EMPTY, SamplePlan, StepPlan

ARRAYS = [f.name for f in fields(StepPlan) if f.name != "step"]
HEADER = 3 + len(ARRAYS)
INT32 = st.integers(-(2**31), 2**31 - 1)
CHECKED = settings(derandomize=True, deadline=None, database=None, max_examples=300)


def make_plan(step: int = 7) -> StepPlan:
    """Every array has a length and values of its own."""
    return StepPlan(step, *(np.arange(n, 2 * n, dtype=np.int32) for n in range(len(ARRAYS))))


def same(a: StepPlan, b: StepPlan) -> bool:
    return a.step == b.step and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


def test_a_plan_comes_back_from_one_int32_array() -> None:
    plan = make_plan()
    packed = plan.pack()
    assert packed.dtype == np.int32 and packed.ndim == 1
    assert packed[1:HEADER].tolist() == [len(packed), 7, *range(len(ARRAYS))]
    back = StepPlan.unpack(packed, 7)
    assert same(back, plan) and all(getattr(back, name).dtype == np.int32 for name in ARRAYS)
    assert back.num_tokens == plan.num_tokens == plan.num_new_B.sum()


def test_an_empty_plan_has_every_array() -> None:
    assert StepPlan.empty(7).pack()[1:].tolist() == [HEADER, 7, *[0] * len(ARRAYS)]


@CHECKED
@given(st.integers(0, 2**31 - 1), st.lists(st.lists(INT32, max_size=9), min_size=len(ARRAYS), max_size=len(ARRAYS)))
def test_any_arrays_come_back(step: int, values: list[list[int]]) -> None:
    plan = StepPlan(step, *(np.array(array, np.int32) for array in values))
    assert same(StepPlan.unpack(plan.pack(), step), plan)


def test_a_plan_of_another_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step plan 7 arrived where 8 was expected"):
        StepPlan.unpack(make_plan().pack(), 8)


@pytest.mark.parametrize("at", [0, 1])
def test_a_wrong_magic_or_total_length_is_refused(at: int) -> None:
    packed = make_plan().pack()
    packed[at] += 1
    with pytest.raises(ValueError, match=f"not a step plan: {len(packed)} words"):
        StepPlan.unpack(packed, 7)


def test_a_plan_cut_short_anywhere_or_with_more_behind_it_is_refused() -> None:
    packed = make_plan().pack()
    for length in range(len(packed)):
        with pytest.raises(ValueError, match=f"not a step plan: {length} words"):
            StepPlan.unpack(packed[:length], 7)
    with pytest.raises(ValueError, match="not a step plan"):
        StepPlan.unpack(np.append(packed, packed[-1:]), 7)


@pytest.mark.parametrize("values", [{3: 1}, {3: -1}, {3: -1, 4: 2}, {3: 2**31 - 1, 4: 2**31 - 1}, {5: -(2**31)}])
def test_array_lengths_that_do_not_add_up_are_refused(values: dict[int, int]) -> None:
    packed = make_plan().pack()
    for at, value in values.items():
        packed[at] = value
    with pytest.raises(ValueError, match="words has arrays of"):
        StepPlan.unpack(packed, 7)


@CHECKED
@given(st.lists(INT32, max_size=2 * HEADER))
def test_garbage_is_a_value_error(words: list[int]) -> None:
    with pytest.raises(ValueError):
        StepPlan.unpack(np.array(words, np.int32), 7)


@CHECKED
@given(st.dictionaries(st.integers(0, HEADER - 1), st.one_of(INT32, st.integers(-3, 120)), min_size=1, max_size=4))
def test_a_damaged_header_is_a_value_error_or_still_a_plan_of_that_length(damage: dict[int, int]) -> None:
    packed = make_plan().pack()
    for at, value in damage.items():
        packed[at] = value
    try:
        plan = StepPlan.unpack(packed, 7)
    except ValueError:
        return
    assert sum(len(getattr(plan, name)) for name in ARRAYS) == len(packed) - HEADER


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_rank_gets_its_share_of_masks_and_logits(size: int) -> None:
    """300 tokens, in shards of whole tiles of 128 ids, the last ones padding: never allowed."""
    masks, logits = np.arange(1, 31, dtype=np.int32).reshape(3, 10), np.arange(1, 601, dtype=np.int32).reshape(2, 300)
    plan = SamplePlan(5, masks.reshape(-1), logits.reshape(-1))
    words = -(-300 // (128 * size)) * 4
    shares = [plan.share(slice(words * rank, words * (rank + 1)), 3, 2) for rank in range(size)]
    shares = [SamplePlan.unpack(share.pack(), 5) for share in shares]
    for name, whole in (("masks", masks), ("logits", logits)):
        found = np.concatenate([getattr(share, name).reshape(len(whole), -1) for share in shares], axis=1)
        assert np.array_equal(found[:, : whole.shape[1]], whole) and not found[:, whole.shape[1] :].any()
    assert len(SamplePlan(5, EMPTY, EMPTY).share(slice(0, words), 0, 0).masks) == 0
