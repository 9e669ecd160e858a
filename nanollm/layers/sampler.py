"""The sampler: from each rank's logits to the same token on every rank."""

from dataclasses import dataclass

from torch import Tensor

from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.sampling import best_candidate


@dataclass
class SamplingBatch:
    """The sampled rows' parameters: temperature float32; seed, choice index and position int64; all [S].

    position_S: how many tokens precede the one being sampled.
    """

    temperature_S: Tensor
    seed_S: Tensor
    choice_S: Tensor
    position_S: Tensor


def sample(logits_r: Tensor, batch: SamplingBatch, first_id: int, tp: TPGroup) -> Tensor:
    """Returns token ids int64 [S]. logits_r: [S, V_r], this rank's shard, whose first column is token first_id.

    Each rank sends its shard's best candidate (value, id), and every rank computes the same winner.
    """
    value_S, id_S = best_candidate(
        logits_r, batch.temperature_S, batch.seed_S, batch.choice_S, batch.position_S, first_id
    )
    return tp.best_of_ranks(value_S, id_S)
