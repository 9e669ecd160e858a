"""Self-attention over the paged KV cache, split over ranks by heads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from nanollm.config import ModelConfig
from nanollm.distributed.partition import HeadPartition
from nanollm.distributed.tp_group import TPGroup
from nanollm.kernels.attention import paged_attention
from nanollm.kernels.backend import HAS_TRITON, gpu
from nanollm.kernels.decode_attention import (
    NewTokens,
    decode_attention,
    decode_attention_from_qkv,
    decode_attention_reference,
    starts_from_qkv,
)
from nanollm.kernels.flash_attention import find_flash
from nanollm.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from nanollm.kernels.qkv_to_cache import qkv_to_cache
from nanollm.layers.hidden import Hidden
from nanollm.layers.linear import QKVParallelLinear, RowParallelLinear
from nanollm.layers.norm import RMSNorm
from nanollm.layers.step_batch import StepBatch


@dataclass(frozen=True)
class AttentionBackend:
    """What computes attention: functions like decode_attention and prefill_attention. why: for the log."""

    name: str
    why: str
    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]


_OURS: dict[str, Callable[..., Tensor]] = {"decode": decode_attention, "prefill": prefill_attention}


class Attention(nn.Module):
    """Grouped-query attention: Hidden in, Hidden out, with the sum over ranks pending.

    k_cache, v_cache: [blocks, block_size, K_r, H], this layer's part of the KV cache, set by the model runner.
    qk_norm: RMSNorm over the head dim of queries and keys, as Qwen3 has it.
    """

    k_cache: Tensor
    v_cache: Tensor
    backend = AttentionBackend("triton", "ours", **_OURS)

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
        q_norm_H = None if self.q_norm is None else self.q_norm.weight
        k_norm_H = None if self.k_norm is None else self.k_norm.weight
        caches = self.k_cache, self.v_cache
        if (
            batch.query_starts_B1 is None
            and self.backend.decode is decode_attention
            and starts_from_qkv(len(batch.positions_T), self.num_kv_heads, self.k_cache.device)
        ):
            tokens = NewTokens(q_norm_H, k_norm_H, self.eps, rope_PH, batch.positions_T, batch.slots_T)
            out_TNH = decode_attention_from_qkv(qkv_TX, tokens, *caches, batch.block_tables_BM, batch.context_lens_B)
            return self.o_proj(out_TNH.flatten(1), residual_TD)
        q_TNH = qkv_to_cache(qkv_TX, q_norm_H, k_norm_H, self.eps, rope_PH, batch.positions_T, batch.slots_T, *caches)
        out_TNH = paged_attention(
            q_TNH,
            *caches,
            batch.block_tables_BM,
            batch.context_lens_B,
            batch.decode_lens_C,
            batch.query_starts_B1,
            self.backend.decode,
            self.backend.prefill,
        )
        return self.o_proj(out_TNH.flatten(1), residual_TD)


# Which kernels are the fastest by GPU generation, as bench/kernels.py measured: (decode, prefill); others: ours. Flash
# is FlashAttention 3 there, so "auto" takes no other version.
_FASTEST = {9: ("triton", "flash")}


def attention_backend(
    wanted: str, heads: HeadPartition, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend to use, of "auto", "triton", "flash" and "torch"; ValueError if what is wanted doesn't run here.

    On a GPU, "flash" that is missing, broken or not for this dtype is no error, but replaced by ours; `why` says so.
    """
    torch_backend = partial(
        AttentionBackend, "torch", decode=decode_attention_reference, prefill=prefill_attention_reference
    )
    if device.type != "cuda" or not HAS_TRITON:
        lacking = "there is no GPU" if device.type != "cuda" else "Triton is not installed"
        if wanted in ("triton", "flash"):
            raise ValueError(f"attention_backend {wanted!r} can't be used: {lacking}; use 'auto' or 'torch'")
        return torch_backend(lacking)
    if wanted == "torch":
        return torch_backend("as asked for")
    if wanted == "triton":
        return AttentionBackend("triton", "as asked for", **_OURS)
    decode, prefill = ("flash", "flash") if wanted == "flash" else _FASTEST.get(gpu(device).capability[0], ("", ""))
    if "flash" not in (decode, prefill):
        return AttentionBackend("triton", "ours", **_OURS)
    if dtype == torch.float32:
        return AttentionBackend("triton", "FlashAttention needs a 16-bit dtype", **_OURS)
    shape = (len(heads.heads), len(heads.kv_heads), head_dim, block_size)
    flash, reason = find_flash(*shape, dtype, device, any_version=wanted == "flash")
    if flash is None:
        return AttentionBackend("triton", f"no FlashAttention: {reason}", **_OURS)
    name = f"FlashAttention {flash.version}" if decode == prefill else f"triton and FlashAttention {flash.version}"
    return AttentionBackend(
        name,
        "as asked for" if wanted == "flash" else "the faster ones here, for decode and prefill",
        flash.decode if decode == "flash" else decode_attention,
        flash.prefill if prefill == "flash" else prefill_attention,
    )


def use_attention_backend(model: nn.Module, backend: AttentionBackend) -> None:
    """Make every Attention of the model use this backend."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend


def bind_kv_cache(model: nn.Module, kv_cache: Tensor) -> None:
    """Give each Attention its layer of kv_cache [layers, 2 (k, v), blocks, block_size, K_r, H], in model order."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer, (k_cache, v_cache) in zip(layers, kv_cache, strict=True):
        layer.k_cache, layer.v_cache = k_cache, v_cache
