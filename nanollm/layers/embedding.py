"""The vocabulary at both ends of the model, split by rows over the ranks: embedding and LM head."""

import torch
from torch import Tensor, nn

from nanollm.distributed.partition import vocab_shard_size
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.embedding import embedding
from nanollm.layers.hidden import Hidden
from nanollm.layers.weights import TensorPart


class _VocabParallel(nn.Module):
    """Holds weight [V_r, D]: this rank's rows of the vocabulary, the last ones padding if V doesn't divide."""

    def __init__(self, vocab_size: int, size: int, tp: TPGroup) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        shard = vocab_shard_size(vocab_size, tp.size)
        self.start = min(tp.rank * shard, vocab_size)
        self.num_rows = min(shard, vocab_size - self.start)  # real ones
        self.weight = nn.Parameter(torch.zeros(shard, size), requires_grad=False)
        self.weight.num_padding = (shard - self.num_rows) * size  # type: ignore[attr-defined]

    def tensor_parts(self, path: str) -> list[TensorPart]:
        size = self.weight.shape[1]
        index = (slice(self.start, self.start + self.num_rows), slice(0, size))
        return [TensorPart(f"{path}.weight", (self.vocab_size, size), index, self.weight[: self.num_rows])]


class VocabParallelEmbedding(_VocabParallel):
    """Token ids to vectors. One rank holds each token's row, the others add zero: the sum is left pending."""

    def forward(self, token_ids_T: Tensor) -> Hidden:
        x_TD = embedding(token_ids_T, self.weight, self.start, self.num_rows)
        return Hidden(x_TD, None) if self.tp.size == 1 else Hidden(None, x_TD)


class ParallelLMHead(_VocabParallel):
    """Hidden to this rank's logits. With `tied_to` it shares that embedding's storage and loads nothing."""

    def __init__(self, vocab_size: int, size: int, tp: TPGroup, tied_to: VocabParallelEmbedding | None = None) -> None:
        super().__init__(vocab_size, size if tied_to is None else 0, tp)
        self.tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight

    def forward(self, hidden: Hidden, out: Tensor | None = None) -> Tensor:
        """logits_r: [L, V_r], its padding -inf so that it can never be sampled; written to `out` if that is given."""
        normed_LD, _ = hidden.resolve(self.tp)
        logits_r = torch.mm(normed_LD, self.weight.t(), out=out)
        if self.num_rows < len(self.weight):
            logits_r[:, self.num_rows :] = float("-inf")
        return logits_r

    def gather(self, logits_r: Tensor) -> Tensor:
        """Every rank's logits side by side, padding cut off: float32 [L, V]."""
        return self.tp.all_gather(logits_r).transpose(0, 1).flatten(1)[:, : self.vocab_size].float()

    def untie(self) -> None:
        """Take storage of its own, to be loaded."""
        num_padding = self.weight.num_padding  # type: ignore[attr-defined]
        self.weight = nn.Parameter(torch.zeros_like(self.weight), requires_grad=False)
        self.weight.num_padding = num_padding  # type: ignore[attr-defined]
        self.tied = False

    def tensor_parts(self, path: str) -> list[TensorPart]:
        return [] if self.tied else super().tensor_parts(path)
