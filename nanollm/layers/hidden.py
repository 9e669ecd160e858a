"""Hidden: what layers hand on, so that whoever reads it can fuse the all-reduce, the residual add and the norm."""

from dataclasses import dataclass, replace

from torch import Tensor

from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.rms_norm import rms_norm


@dataclass(frozen=True)
class Hidden:
    """The residual stream, with work still pending: norm(residual + all_reduce(pending)) * norm_weight.

    residual_TD: None before the first layer.
    pending_TD: this rank's partial sum from a row-parallel layer (or the embedding), not reduced or added yet; or
        parts of it, [Z, T, D]; None if that was done already.
    norm_weight_D, norm_eps: the RMSNorm that the next reader applies, set by the RMSNorm layer.
    """

    residual_TD: Tensor | None
    pending_TD: Tensor | None
    norm_weight_D: Tensor | None = None
    norm_eps: float = 0.0

    def rows(self, index: Tensor | slice) -> "Hidden":
        """Only the given tokens: a slice, or int [L]."""
        residual_TD = None if self.residual_TD is None else self.residual_TD[index]
        pending_TD = None if self.pending_TD is None else self.pending_TD[..., index, :]
        if pending_TD is not None and pending_TD.dim() == 3:  # cheap for the rows that are left
            pending_TD = pending_TD.sum(0).to(self.residual_TD)
        return replace(self, residual_TD=residual_TD, pending_TD=pending_TD)

    def resolve(self, tp: TPGroup) -> tuple[Tensor, Tensor]:
        """Do what is pending. Returns (normed_TD, residual_TD)."""
        assert self.norm_weight_D is not None, "a norm must stand between two layers"
        if self.pending_TD is None:
            assert self.residual_TD is not None
            return rms_norm(self.residual_TD, self.norm_weight_D, self.norm_eps), self.residual_TD
        return tp.all_reduce_norm(self.pending_TD, self.residual_TD, self.norm_weight_D, self.norm_eps)
