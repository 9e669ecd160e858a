"""The sampler: from each rank's logits to the same tokens on every rank, and log probabilities.

The order of operations is vLLM's: bans, bias and penalties (kernels.token_rules), temperature, min_p, top_k, top_p
(kernels.threshold), the draw (kernels.draw). Log probabilities are of the logits as they came from the model, or in the
"processed" modes of what was drawn from.
"""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.advance_rows import advance_rows
from nanollm.kernels.backend import runs_triton
from nanollm.kernels.draw import draw
from nanollm.kernels.threshold import Limits, cut, threshold
from nanollm.kernels.tile_stats import tile_stats
from nanollm.kernels.token_rules import RowLogits, SamplerState
from nanollm.sampling_params import RULES, SINGLES_OUT, TEMPERATURE

CANDIDATES = 64  # most logits of a row that each rank sends when its filters can be settled with the largest


class Filters(IntEnum):
    """What a row's filters need to know of other ranks' logits; on one rank, whether they are to be counted."""

    NONE = 0  # nothing: it has no filters
    LARGEST = 1  # the largest: it has min_p alone, or top_k of at most CANDIDATES and maybe the others
    ALL = 2  # every one: top_p, or a larger top_k, may cut anywhere

    @staticmethod
    def of(temperature: float, top_k: int, top_p: float, min_p: float) -> "Filters":
        if temperature == 0 or (not top_k and top_p == 1 and min_p == 0):
            return Filters.NONE
        settled = 0 < top_k <= CANDIDATES or (not top_k and top_p == 1)
        return Filters.LARGEST if settled else Filters.ALL


class Sampler:
    """Samples tokens for rows of `state`, into last_token_R (int64 [R]).

    vocab: token ids of this rank's share of the vocabulary, without padding. logprobs_mode: as in EngineConfig.

    Each rank sends its best candidate (value, id) of each row, and all pick the same winner. Filters cut a row at one
    logit of the whole vocabulary. With min_p alone or top_k up to 64 that is settled by each rank's 64 largest;
    otherwise the rows of the step are gathered, in which some row has top_p without such a top_k, or a larger top_k.
    """

    def __init__(
        self, state: SamplerState, last_token_R: Tensor, vocab: range, tp: TPGroup, logprobs_mode: str
    ) -> None:
        self.state, self._last_token_R, self._vocab, self.tp = state, last_token_R, vocab, tp
        self._mode = logprobs_mode

    def sample(
        self,
        logits_r: Tensor,
        rows_S: Tensor,
        positions_S: Tensor,
        filters: Filters = Filters.NONE,
        logprobs: tuple[Tensor, int] | None = None,
        raw_r: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (token ids int64 [S], log probabilities or None). A row with no finite logit gets -1.

        logits_r: [S, V_r], this rank's shard. rows_S, positions_S: int64, rows of the state, and how many tokens
        precede the one to be sampled. filters: the most that any of these rows needs.
        logprobs: which of these (int64 indices) want log probabilities, and how many; see token_logprobs. raw_r: the
        model's own logits, if the host has changed them.
        """
        rows = RowLogits(logits_r, rows_S, positions_S, self.state, self._vocab.start)
        if not runs_triton(logits_r):
            rows = rows.processed()  # once for all that follows
        limits = None
        if filters is Filters.NONE:
            id_S = self.tp.best_of_ranks(*draw(rows, *tile_stats(rows)))
        elif filters is Filters.ALL or self.tp.size == 1:
            whole = rows
            if self.tp.size > 1:
                tile_stats(rows)  # which applies the rules
                whole_SV = self.tp.all_gather(_processed(rows)).transpose(0, 1).flatten(1)
                whole = RowLogits(whole_SV, rows_S, positions_S, self.state, has_rules=False, raw_dtype=logits_r.dtype)
            stats = tile_stats(whole, counts=filters is Filters.ALL)
            limits = threshold(whole, *stats)
            _, id_S = draw(whole, *stats, limits)
        else:
            stats = tile_stats(rows)
            limits = Limits(self._merged_threshold(rows))
            id_S = self.tp.best_of_ranks(*draw(rows, *stats, limits))
        wanted = None
        if logprobs is not None:
            index_L, num_top = logprobs
            raw_r = logits_r if raw_r is None else raw_r
            x_LV = raw_r if self._mode.startswith("raw") else _drawn_from(rows, limits)
            as_logits = self._mode.endswith("logits")
            wanted = self.token_logprobs(x_LV[index_L], id_S[index_L], num_top, as_logits=as_logits)
        advance_rows(id_S, rows_S, positions_S, self.state, self._last_token_R, self._vocab.start)
        return id_S, wanted

    def token_logprobs(self, logits_r: Tensor, token_L: Tensor, num_top: int, *, as_logits: bool = False) -> Tensor:
        """Float64 [L, 2 + 2 num_top], on every rank: the token's log probability and rank, then the most likely ones'
        log probabilities, then their ids. Rank 1 is the likeliest; of equals the last counts, as in vLLM.

        logits_r: [L, V_r], any float dtype. token_L: int64 ids. as_logits: logits instead.
        """
        first_id, size = self._vocab.start, min(num_top, logits_r.shape[1])
        index_L = token_L - first_id
        ours_L = (index_L >= 0) & (index_L < len(self._vocab))
        own_L = logits_r.gather(1, index_L.where(ours_L, 0)[:, None])[:, 0].float().where(ours_L, float("-inf"))
        # Padding comes last of all, behind real tokens that are as impossible: so it is never among the likeliest.
        x_LV = logits_r[:, : len(self._vocab)].float()
        top = x_LV.topk(min(size, len(self._vocab)))
        shares = [own_L[:, None], x_LV.logsumexp(-1, keepdim=True)]
        for x_LK in (top.values, top.indices + first_id):
            shares.append(F.pad(x_LK.double(), (0, size - x_LK.shape[1]), value=float("-inf")))
        own_RL1, sum_RL1, top_RLK, id_RLK = self.tp.all_gather(torch.cat([s.double() for s in shares], 1)).split(
            [1, 1, size, size], -1
        )
        own_L1 = own_RL1.amax(0)
        rank_L1 = self.tp.all_gather((x_LV >= own_L1).sum(-1, keepdim=True)).sum(0)
        top_LK, order_LK = top_RLK.transpose(0, 1).flatten(1).sort(stable=True, dim=-1, descending=True)
        id_LK = id_RLK.transpose(0, 1).flatten(1).gather(1, order_LK)
        shift_L1 = 0.0 if as_logits else sum_RL1.logsumexp(0)
        values = [own_L1 - shift_L1, rank_L1.double(), (top_LK - shift_L1)[:, :num_top], id_LK[:, :num_top]]
        return torch.cat(values, 1)

    def _merged_threshold(self, rows: RowLogits) -> Tensor:
        """kernels.threshold of the whole vocabulary, from every rank's largest logits."""
        x_SV = _processed(rows)
        size = min(CANDIDATES, x_SV.shape[1])
        top_SC = x_SV.topk(size).values
        # There may be more that equal the smallest of these: it stands for all of them.
        surplus_S1 = (x_SV >= top_SC[:, -1:]).sum(-1, keepdim=True) - size
        shares_RSC = self.tp.all_gather(torch.cat((top_SC, surplus_S1.float()), 1)).double()
        top_RSC, count_RSC = shares_RSC[..., :size], torch.ones_like(shares_RSC[..., :size])
        count_RSC[..., -1] += shares_RSC[..., -1]
        top_SC, order_SC = top_RSC.transpose(0, 1).flatten(1).sort(-1, descending=True)
        count_SC = count_RSC.transpose(0, 1).flatten(1).gather(1, order_SC)
        return cut(rows, top_SC.float(), count_SC)


def _processed(rows: RowLogits) -> Tensor:
    """Float32 [S, V_r] with the rules applied; after a kernel that leaves them in the scratch, on a GPU."""
    if not rows.has_rules:
        return rows.logits_SV
    assert rows.scratch_SV is not None
    x_SV = rows.masked(rows.logits_SV.float().nan_to_num(float("-inf"), float("inf"), float("-inf")))
    return torch.where(rows.ints(RULES)[:, None] & SINGLES_OUT != 0, rows.scratch_SV, x_SV)


def _drawn_from(rows: RowLogits, limits: Limits | None) -> Tensor:
    """Float32 [S, V_r]: the logits over the temperature, -inf where a filter dropped them."""
    x_SV, temperature_S1 = _processed(rows), rows.floats(TEMPERATURE)[:, None]
    if limits is not None:
        x_SV = x_SV.where(x_SV >= limits.threshold_S[:, None], float("-inf"))
    return x_SV / temperature_S1.where(temperature_S1 > 0, 1.0)
