"""StepPlan: what a rank must know to run one step, as int32 arrays; SamplePlan: what some wait for; NumPy only."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from nanollm.outputs import TokenLogprobs

if TYPE_CHECKING:
    import torch

Int32 = NDArray[np.int32]
_MAGIC = 0x6E616E6F  # "nano"
EMPTY = np.zeros(0, np.int32)
_P = TypeVar("_P", bound="_Plan")


@dataclass
class _Plan:
    """A step number, and int32 arrays in the subclass's fields."""

    step: int

    def pack(self) -> Int32:
        """One int32 array: magic, total length, step, the length of each array, then the arrays."""
        _, *arrays = vars(self).values()  # in the order of the fields
        header = [_MAGIC, 3 + len(arrays) + sum(map(len, arrays)), self.step, *map(len, arrays)]
        return np.concatenate([np.array(header, np.int32), *arrays])

    @classmethod
    def unpack(cls: type[_P], packed: Int32, step: int) -> _P:
        """The inverse of pack. ValueError if the array is not a whole plan, or not that of `step`."""
        start = 2 + len(cls.__match_args__)
        header = packed[:start].tolist()  # Python's integers are the faster ones for so few
        if len(header) < start or header[:2] != [_MAGIC, len(packed)]:
            raise ValueError(f"not a step plan: {len(packed)} words, header {header[:3]}")
        lengths = header[3:]
        if min(lengths) < 0 or start + sum(lengths) != len(packed):
            raise ValueError(f"step plan of {len(packed)} words has arrays of {lengths} words")
        if header[2] != step:
            raise ValueError(f"step plan {header[2]} arrived where {step} was expected")
        ends = accumulate(lengths, initial=start)
        return cls(step, *(packed[first:end] for first, end in pairwise(ends)))

    @classmethod
    def empty(cls: type[_P], step: int) -> _P:
        """A plan with nothing in its arrays."""
        return cls(step, *[EMPTY] * (len(cls.__match_args__) - 1))


@dataclass
class StepPlan(_Plan):
    """One step of every rank. B rows compute; a row is a slot of the ranks' persistent per-row state.

    Flat tokens are the rows' tokens one row after another, in the order of row_ids_B.

    step: sequence number of the plan, counted from 0; a rank that reads another one than it expects has lost a plan.
    row_ids_B: the rows, each at most once.
    num_new_B: tokens to compute for each row, at least 1.
    num_computed_B: tokens of each row whose KV is in the cache already.
    on_device_B: 1 if the row's one token is the last one sampled in this row, which only the device knows.
    host_tokens: token ids of all other rows, flat.
    append_rows, append_starts, append_counts, append_blocks: block-table appends: for each entry i, the next
        append_counts[i] ids of append_blocks go to row append_rows[i] from table position append_starts[i].
    logit_rows_L: flat token positions whose logits are needed; the first belong to sampled_rows_S.
    sampled_rows_S: rows that sample a token in this step, in the order of logit_rows_L.
    params_rows, params: rows that start with new sampling parameters, and NUM_PARAMS words for each, the columns of
        nanollm.sampling_params.
    rules: for each of them that has rules, in order, what RowRules packs.
    num_logprobs_L: for each logit row, how many of the likeliest tokens' log probabilities are wanted beside its own
        token's; -1 for nothing. Empty if no row wants any.
    targets: for the logit rows after the sampled ones, whose token is not the sampled one: the prompt token whose log
        probability is wanted; -1 where the logits themselves are. Empty if there are no such rows.
    masked, processed: which of sampled_rows_S, by index, depend on the host: on a mask, and on logits that it changes.
        If any do, the step is sampled once the SamplePlan with those comes.
    """

    row_ids_B: Int32
    num_new_B: Int32
    num_computed_B: Int32
    on_device_B: Int32
    host_tokens: Int32
    append_rows: Int32
    append_starts: Int32
    append_counts: Int32
    append_blocks: Int32
    logit_rows_L: Int32
    sampled_rows_S: Int32
    params_rows: Int32
    params: Int32
    rules: Int32
    num_logprobs_L: Int32
    targets: Int32
    masked: Int32
    processed: Int32

    @property
    def waits(self) -> bool:
        """Whether a SamplePlan follows."""
        return bool(len(self.masked) or len(self.processed))

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes, T."""
        return int(self.num_new_B.sum())


@dataclass
class SamplePlan(_Plan):
    """What the host decides once the step before has been read.

    masks: for each row of StepPlan.masked a bit for each token, the lowest first; 1 allows it.
    logits: for each row of StepPlan.processed its logits, float32 as their bits; share() pads V to 32 times
        the words of a mask.
    """

    masks: Int32
    logits: Int32

    def share(self, words: slice, masked: int, processed: int) -> "SamplePlan":
        """Of the rank whose tokens these words of a mask stand for; how many rows there are of either."""
        tokens = slice(32 * words.start, 32 * words.stop)
        return SamplePlan(self.step, _columns(self.masks, masked, words), _columns(self.logits, processed, tokens))


def _columns(values: Int32, rows: int, columns: slice) -> Int32:
    """These columns of a flat matrix, flat; past its end are zeros."""
    if not rows:
        return EMPTY
    part = values.reshape(rows, -1)[:, columns]
    if missing := columns.stop - columns.start - part.shape[1]:
        part = np.pad(part, ((0, 0), (0, missing)))
    return part.reshape(-1)


@dataclass
class RowRules:
    """What is special about single tokens in a row, as it starts.

    num_tokens: of the sequence. prompt_ids, output_ids: tokens that penalties or bad words look at.
    allowed_ids: None allows all.
    slots: token id -> (bias, position before which it is banned).
    bad_words: bad words of several tokens: (the last token, the tokens before it); the last token has a slot.
    """

    num_tokens: int
    prompt_ids: list[int]
    output_ids: list[int]
    allowed_ids: list[int] | None
    slots: dict[int, tuple[float, int]]
    bad_words: list[tuple[int, list[int]]]

    def pack(self) -> list[int]:
        """Int32 words: num_tokens, the five lengths (-1 allowed ids for None), then the values."""
        ids, slots = list(self.slots), list(self.slots.values())
        allowed = [] if self.allowed_ids is None else self.allowed_ids
        biases = np.array([bias for bias, _ in slots], np.float32).view(np.int32).tolist()
        bad_words = [word for last, prefix in self.bad_words for word in (last, len(prefix), *prefix)]
        num_allowed = -1 if self.allowed_ids is None else len(allowed)
        lengths = [len(self.prompt_ids), len(self.output_ids), num_allowed, len(ids), len(self.bad_words)]
        until = [until for _, until in slots]
        return [
            self.num_tokens,
            *lengths,
            *self.prompt_ids,
            *self.output_ids,
            *allowed,
            *ids,
            *biases,
            *until,
            *bad_words,
        ]

    @staticmethod
    def unpack(words: Int32) -> tuple["RowRules", Int32]:
        """The inverse of pack, from the front of these words; returns what is left of them too."""
        num_tokens, *lengths, num_slots, num_bad_words = words[:6].tolist()
        sizes = [6, lengths[0], lengths[1], max(lengths[2], 0), num_slots, num_slots, num_slots]
        _, prompt_ids, output_ids, allowed, ids, biases, until, rest = np.split(words, np.cumsum(sizes))
        bad_words = []
        for _ in range(num_bad_words):
            bad_words.append((int(rest[0]), rest[2 : 2 + rest[1]].tolist()))
            rest = rest[2 + rest[1] :]
        slots = zip(ids.tolist(), biases.view(np.float32).tolist(), until.tolist(), strict=True)
        rules = RowRules(
            num_tokens,
            prompt_ids.tolist(),
            output_ids.tolist(),
            allowed.tolist() if lengths[2] >= 0 else None,
            {token_id: (bias, until) for token_id, bias, until in slots},
            bad_words,
        )
        return rules, rest


@dataclass
class StepResult:
    """What a step brings back.

    token_ids: one for each row of sampled_rows_S; -1 if no token was possible. logprobs: for each logit row that wants
    them, in order. logits: of the other logit rows that want those, float32 on the CPU, if there are any.
    """

    token_ids: list[int]
    logits: "torch.Tensor | None" = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
