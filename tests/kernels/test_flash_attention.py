"""FlashAttention's versions behind one signature: found, checked and called as each wants it.

They need GPUs; here modules of their names compute by the definition from exactly the arguments that each one takes.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nanollm.kernels.flash_attention import Flash, find_flash
from nanollm.kernels.prefill_attention import prefill_attention_reference


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, causal: bool,
) -> Tensor:  # fmt: skip
    assert causal
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    return prefill_attention_reference(q, k_cache, v_cache, page_table, cu_seqlens_q, cache_seqlens)


def version_4(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_q: int, page_table: Tensor,
    causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    assert causal
    return prefill_attention_reference(q, k, v, page_table, cu_seqlens_q, seqused_k), None


def version_2(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, block_table: Tensor, causal: bool,
) -> Tensor:  # fmt: skip
    assert causal
    assert cu_seqlens_k.dtype == torch.int32
    return prefill_attention_reference(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff())


def inside_vllm(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor, max_seqlen_k: int,
    block_table: Tensor, causal: bool, fa_version: int,
) -> Tensor:  # fmt: skip
    assert fa_version == 3
    return version_4(
        q, k, v, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k, max_seqlen_q=max_seqlen_q, page_table=block_table,
        causal=causal,
    )[0]  # fmt: skip


INSTALLED: dict[str, tuple[str, Callable[..., Any]]] = {
    "flash_attn_interface": ("flash_attn_with_kvcache", flash_attn_with_kvcache),
    "vllm.vllm_flash_attn": ("flash_attn_varlen_func", inside_vllm),
    "flash_attn.cute": ("flash_attn_varlen_func", version_4),
    "flash_attn": ("flash_attn_varlen_func", version_2),
}


def install(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any] | None = None) -> None:
    for package in (name.split(".")[0], name):
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
    function_name, real = INSTALLED[name]
    monkeypatch.setattr(sys.modules[name], function_name, function or real, raising=False)


def find(block_size: int = 256) -> tuple[Flash | None, str]:
    return find_flash(6, 2, 32, block_size, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("name", "version"), list(zip(INSTALLED, (3, 3, 4, 2), strict=True)))
def test_every_version_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch, name: str, version: int) -> None:
    install(monkeypatch, name)
    flash, _ = find()
    assert flash is not None
    assert flash.version == version
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 3, 256, 2, 32)
    tables_BM, lens_B = torch.tensor([[1, 0], [0, 2]], dtype=torch.int32), torch.tensor([9, 300], dtype=torch.int32)
    q_TNH, starts_B1 = torch.randn(14, 6, 32), torch.tensor([0, 4, 14], dtype=torch.int32)
    given = (q_TNH, k_cache, v_cache, tables_BM, starts_B1, lens_B)
    assert torch.equal(flash.prefill(*given), prefill_attention_reference(*given))
    alone = prefill_attention_reference(q_TNH[:2], *given[1:4], torch.tensor([0, 1, 2]), lens_B)
    assert torch.equal(flash.decode(q_TNH[:2], *given[1:4], lens_B), alone)
    out, lens_B[0] = torch.full((2, 6, 32), 7.0), 0
    flash.decode(q_TNH[:2], *given[1:4], lens_B, out=out)
    assert (out[0] == 7).all()  # nothing to decode: left as it is
    assert torch.equal(out[1], alone[1])


WITH_CUSTOM_OP = """
import torch
from nanollm.kernels.prefill_attention import prefill_attention_reference

@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=(), device_types="cpu")
def _flash_attn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor:
    return prefill_attention_reference(q, k, v, tables, starts, lens)

def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q=0, causal=False):
    return _flash_attn_forward(q, k, v, page_table, cu_seqlens_q, cache_seqlens)
"""

FIND = """
import sys, torch
from nanollm.kernels.flash_attention import find_flash
print(find_flash(6, 2, 32, 256, torch.float32, torch.device("cpu"))[0].version, "torch._dynamo" in sys.modules)
import flash_attn_interface
print(type(flash_attn_interface._flash_attn_forward).__name__)
"""


def test_version_3_starts_without_the_imports_of_torch_compile(tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(WITH_CUSTOM_OP)
    found = subprocess.run(
        [sys.executable, "-c", FIND],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["3", "False", "CustomOpDef"], found.stderr  # and what others use is as it was


def test_where_none_was_measured_only_version_3_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn")
    given = (6, 2, 32, 256, torch.float32, torch.device("cpu"))
    assert find_flash(*given, any_version=False)[0] is None
    assert find_flash(*given)[0] is not None


def test_none_installed_is_said() -> None:
    assert find() == (None, "no version of FlashAttention is installed")


def broken(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("undefined symbol: _ZN3c10")


def wrong(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros_like(q)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(broken, "flash_attn_interface: RuntimeError: undefined symbol: _ZN3c10"), (wrong, "its results are wrong here")],
)
def test_a_broken_one_is_passed_over_for_the_next(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], reason: str
) -> None:
    install(monkeypatch, "flash_attn_interface", function)
    flash, why = find()
    assert flash is None
    assert reason in why
    install(monkeypatch, "flash_attn")
    flash, why = find()
    assert flash is not None
    assert (flash.version, reason in why) == (2, True)


def test_version_2_needs_blocks_of_256_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn")
    flash, why = find(block_size=64)
    assert flash is None
    assert "multiple of 256 tokens, not 64" in why


def test_a_module_that_lacks_something_it_needs_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "flash_attn":
                raise ModuleNotFoundError("No module named 'einops'", name="einops")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    flash, why = find()
    assert flash is None
    assert "flash_attn: No module named 'einops'" in why
