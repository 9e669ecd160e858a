"""Triton where it is installed, and what a launch must know about the GPU. Kernel files import both from here.

Steps slice the lengths and tables of their rows anywhere: kernels that read them one by one are marked
do_not_specialize_on_alignment, so that Triton compiles no variant for each alignment, in the middle of serving.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:

    class _Absent:
        """Lets a kernel file load without Triton, which then runs nothing but the definitions."""

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **options: given[0] if given else self.jit  # triton.jit, tl.constexpr

    triton = tl = _Absent()  # type: ignore[assignment]
    HAS_TRITON = False

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.3
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "tl", "triton"]


def runs_triton(x: Tensor) -> bool:
    """Whether the kernels run on x: on a CUDA GPU where Triton is installed. Elsewhere their definitions do."""
    return HAS_TRITON and x.is_cuda


@dataclass(frozen=True)
class Gpu:
    """name: "NVIDIA H200". capability: (9, 0) for that one. shared_bytes: shared memory of one program. num_sms: its
    multiprocessors."""

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    num_sms: int


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """What launches depend on. Triton's interpreter runs without a GPU and is told of a small one."""
    if device.type != "cuda":
        return Gpu("", (8, 0), 99 * 1024, 8)
    found = torch.cuda.get_device_properties(device)
    shared = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Gpu(found.name, (found.major, found.minor), shared, found.multi_processor_count)


def table_path(gpu_name: str) -> Path:
    """Where bench/tune.py keeps what it measured on such a GPU."""
    return Path(__file__).parent / "tuned" / f"{gpu_name.replace(' ', '_')}.json"


@functools.cache
def _table(gpu_name: str) -> dict[str, dict[str, list[int] | None]]:
    path = table_path(gpu_name)
    return json.loads(path.read_text()) if path.exists() else {}


def measured_cuts(
    size_out: int, size_in: int, device: torch.device, *, gated: bool = False
) -> dict[str, list[int] | None]:
    """By number of rows, how best to cut a matmul by a weight [O, I] on this GPU, None for the library's.

    gated: the weight is gate's and up's, and what comes out is SiLU(gate) * up. Only what bench/tune.py measured: rows
    may be absent, and all are for shapes or GPUs that it never saw.
    """
    return _table(gpu(device).name).get(f"{size_out}x{size_in}{' gated' * gated}", {})


def overlap(device: torch.device) -> dict[str, bool]:
    """Launch arguments for programmatic dependent launch, where the GPU has it (Hopper and later).

    Such a kernel starts while the one before it still runs, and calls gdc_wait before it reads what that one writes.
    Every kernel that takes PDL waits, in every program, so that "the one before" includes all before that one. Before
    the wait only weights are read; what was complete before the step's embedding, which lets others start after its own
    wait (lengths, positions, slots and tables of its rows, the KV cache of earlier steps); and where the kernel before
    does so too, as sampling's do, what is older than that one. Whoever changes weights must synchronize before the next
    step.
    """
    if gpu(device).capability < (9, 0) or gdc_wait is None:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: Triton's tiles have such sizes."""
    return 1 << max(n - 1, 0).bit_length()
