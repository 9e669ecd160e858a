"""FlashAttention over our paged cache, whichever version is installed (Dao et al., 2022; 2023; Shah et al., 2024).

Each version has its own module, names and block sizes; here they get the signatures of our own kernels.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from nanollm.kernels.prefill_attention import prefill_attention_reference

Settings = dict[str, Any]


@dataclass(frozen=True)
class Flash:
    """version: 2, 3 or 4. function: its attention over a paged cache. settings: how it names (block tables, starts of
    the rows' queries, context lengths, longest query, block size)."""

    version: int
    function: Callable[..., Any]
    settings: Callable[..., Settings]

    def attend(
        self,
        q_TNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables_BM: Tensor,
        starts_B1: Tensor,
        lens_B: Tensor,
        longest: int,
    ) -> Tensor:
        """[T, N, H]. longest: as many queries as any row has, or more."""
        settings = self.settings(tables_BM, starts_B1, lens_B, longest, k_cache.shape[1])
        found = self.function(q_TNH, k_cache, v_cache, causal=True, **settings)
        out_TNH: Tensor = found[0] if isinstance(found, tuple) else found  # version 4 returns log-sum-exps too
        return out_TNH

    def prefill(
        self,
        q_TNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables_BM: Tensor,
        query_starts_B1: Tensor,
        context_lens_B: Tensor,
    ) -> Tensor:
        """As prefill_attention."""
        return self.attend(q_TNH, k_cache, v_cache, block_tables_BM, query_starts_B1, context_lens_B, len(q_TNH))

    def decode(
        self,
        q_BNH: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables_BM: Tensor,
        context_lens_B: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """As decode_attention, but for what a row of context 0 gets without `out`: anything."""
        starts_B1 = torch.arange(len(q_BNH) + 1, dtype=torch.int32, device=q_BNH.device)
        out_BNH = self.attend(q_BNH.contiguous(), k_cache, v_cache, block_tables_BM, starts_B1, context_lens_B, 1)
        if out is None:
            return out_BNH
        return out.copy_(torch.where((context_lens_B > 0)[:, None, None], out_BNH, out))


def _version_3(tables: Tensor, starts: Tensor, lens: Tensor, longest: int, block_size: int) -> Settings:
    return {"cache_seqlens": lens, "page_table": tables, "cu_seqlens_q": starts, "max_seqlen_q": longest}


def _inside_vllm(tables: Tensor, starts: Tensor, lens: Tensor, longest: int, block_size: int) -> Settings:
    queries = {"cu_seqlens_q": starts, "max_seqlen_q": longest, "fa_version": 3}
    return queries | {"seqused_k": lens, "max_seqlen_k": tables.shape[1] * block_size, "block_table": tables}


def _version_4(tables: Tensor, starts: Tensor, lens: Tensor, longest: int, block_size: int) -> Settings:
    return {"seqused_k": lens, "page_table": tables, "cu_seqlens_q": starts, "max_seqlen_q": longest}


def _version_2(tables: Tensor, starts: Tensor, lens: Tensor, longest: int, block_size: int) -> Settings:
    if block_size % 256:
        raise ValueError(f"FlashAttention 2 needs blocks of a multiple of 256 tokens, not {block_size}")
    starts_k = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    queries = {"cu_seqlens_q": starts, "max_seqlen_q": longest}
    return queries | {"cu_seqlens_k": starts_k, "max_seqlen_k": tables.shape[1] * block_size, "block_table": tables}


# In the order in which they are tried.
_KINDS: list[tuple[int, str, str, Callable[..., Settings]]] = [
    (3, "flash_attn_interface", "flash_attn_with_kvcache", _version_3),
    (3, "vllm.vllm_flash_attn", "flash_attn_varlen_func", _inside_vllm),
    (4, "flash_attn.cute", "flash_attn_varlen_func", _version_4),
    (2, "flash_attn", "flash_attn_varlen_func", _version_2),
]


def find_flash(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    any_version: bool = True,
) -> tuple[Flash | None, str]:
    """The first version that is installed and right on this device, and in one sentence why others were not taken.

    any_version: False looks for the first of them only, FlashAttention 3 in a package of its own.
    """
    reasons = []
    for version, module, name, settings in _KINDS if any_version else _KINDS[:1]:
        try:
            function = _without_custom_op(getattr(importlib.import_module(module), name))
            flash = Flash(version, function, settings)
            _check(flash, num_heads, num_kv_heads, head_dim, block_size, dtype, device)
        except ModuleNotFoundError as error:
            # It is there, but something that it needs isn't.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                reasons.append(f"{module}: {error}")
        except Exception as error:  # whatever a broken or foreign build raises
            reasons.append(f"{module}: {type(error).__name__}: {error}".splitlines()[0])
        else:
            return flash, "; ".join(reasons)
    return None, "; ".join(reasons) or "no version of FlashAttention is installed"


def _without_custom_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of FlashAttention 3's function that calls what its custom operator of torch.library wraps.

    The operator's first call imports torch.compile's machinery, which takes seconds.
    """
    name = "_flash_attn_forward"
    if not isinstance(function, FunctionType) or not hasattr(function.__globals__.get(name), "_init_fn"):
        return function
    with_wrapped = function.__globals__ | {name: function.__globals__[name]._init_fn}
    copy = FunctionType(function.__code__, with_wrapped, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _check(
    flash: Flash,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """RuntimeError if it computes something else than the definition does."""
    random = torch.Generator(device).manual_seed(0)
    shape = (4, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=random, dtype=dtype, device=device) for _ in range(2))
    tables_BM = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
    lens_B = torch.tensor([5, block_size + 3], dtype=torch.int32, device=device)
    for queries in ([1, 1], [5, 7]):
        starts_B1 = torch.tensor([0, queries[0], sum(queries)], dtype=torch.int32, device=device)
        q_TNH = torch.randn(sum(queries), num_heads, head_dim, generator=random, dtype=dtype, device=device)
        inputs = (q_TNH, k_cache, v_cache, tables_BM)
        expected = prefill_attention_reference(*inputs, starts_B1, lens_B)
        decodes = queries == [1, 1]
        out = flash.decode(*inputs, lens_B) if decodes else flash.prefill(*inputs, starts_B1, lens_B)
        if not torch.allclose(out.float(), expected.float(), atol=0.03, rtol=0.03):
            raise RuntimeError("its results are wrong here")
