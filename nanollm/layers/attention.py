"""Self-attention over the paged KV cache, split over ranks by heads."""

import torch
from torch import Tensor, nn

from nanollm.config import ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.attention import paged_attention, paged_attention_reference
from nanollm.kernels.backend import HAS_TRITON
from nanollm.kernels.qkv_to_cache import qkv_to_cache
from nanollm.layers.hidden import Hidden
from nanollm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanollm.layers.norm import RMSNorm
from nanollm.layers.step_batch import StepBatch


class Attention(nn.Module):
    """Grouped-query attention: Hidden in, Hidden out, with the sum over ranks pending.

    k_cache, v_cache: [blocks, block_size, K_r, H], this layer's part of the KV cache, set by the model runner.
    qk_norm: RMSNorm over the head dim of queries and keys, as Qwen3 has it.
    """

    k_cache: Tensor
    v_cache: Tensor
    backend = "triton"  # or "torch", the definition; on the CPU they are the same

    def __init__(self, config: ModelConfig, tp: TPGroup, *, qk_norm: bool) -> None:
        super().__init__()
        heads = HeadPartition(config.num_heads, config.num_kv_heads, tp.size, tp.rank)
        head_dim, size = config.head_dim, config.hidden_size
        self.num_kv_heads = len(heads.kv_heads)
        self.eps = config.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(size, heads, head_dim, config.qkv_bias, tp)
        kept = range(heads.heads.start * head_dim, heads.heads.stop * head_dim)
        self.o_proj = RowParallelLinear(config.num_heads * head_dim, size, kept, config.o_bias, tp)
        self.q_norm = RMSNorm(head_dim, self.eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, self.eps) if qk_norm else None

    def forward(self, hidden: Hidden, batch: StepBatch, rope_PH: Tensor) -> Hidden:
        qkv_TX, residual_TD = self.qkv_proj(hidden)
        q_TNH = qkv_to_cache(
            qkv_TX,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            rope_PH,
            batch.positions_T,
            batch.slots_T,
            self.k_cache,
            self.v_cache,
        )
        attend = paged_attention if self.backend == "triton" else paged_attention_reference
        out_TNH = attend(
            q_TNH,
            self.k_cache,
            self.v_cache,
            batch.block_tables_BM,
            batch.query_starts_B1,
            batch.context_lens_B,
            batch.num_decodes,
        )
        return self.o_proj(out_TNH.flatten(1), residual_TD)


def attention_backend(wanted: str, device: torch.device) -> tuple[str, str]:
    """The backend to use ("triton" or "torch") and why; ValueError if what is wanted doesn't run here."""
    if device.type != "cuda" or not HAS_TRITON:
        lacking = "there is no GPU" if device.type != "cuda" else "Triton is not installed"
        if wanted == "triton":
            raise ValueError(f"attention_backend 'triton' can't be used: {lacking}; use 'auto' or 'torch'")
        return "torch", lacking
    return (
        ("torch", "as asked for") if wanted == "torch" else ("triton", "as asked for" if wanted != "auto" else "ours")
    )


def use_attention_backend(model: nn.Module, backend: str) -> None:
    """Make every Attention of the model use this backend."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend


def bind_kv_cache(model: nn.Module, kv_cache: Tensor) -> None:
    """Give each Attention its layer of kv_cache [layers, 2 (k, v), blocks, block_size, K_r, H], in model order."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer, (k_cache, v_cache) in zip(layers, kv_cache, strict=True):
        layer.k_cache, layer.v_cache = k_cache, v_cache
