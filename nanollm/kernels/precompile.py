"""Kernels compiled before they are needed, all at once. Triton alone compiles what is launched, one after another."""
# mypy: allow-untyped-defs

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

from nanollm.kernels.backend import HAS_TRITON, triton

_one_at_a_time = threading.Lock()
_COMPILES_ASIDE = (
    hasattr(triton, "AsyncCompileMode") and "ignore_errors" in inspect.signature(triton.AsyncCompileMode).parameters
)


@triton.jit
def _nothing_kernel():
    pass


def start_compiler(device: torch.device) -> threading.Thread:
    """Have Triton get ready while something else happens; join the thread before the first launch.

    Triton hashes its own libraries, and with an empty cache builds its access to the driver: half a second and more.
    """

    def compile_nothing() -> None:
        if device.type == "cuda" and HAS_TRITON:
            torch.cuda.set_device(device)
            _nothing_kernel.warmup(grid=(1,))

    thread = threading.Thread(target=compile_nothing, daemon=True)
    thread.start()
    return thread


class _Loader:
    """An executor for Triton, whose compiler leaves the interpreter to other threads most of the time."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_variant: Callable[[], Any]) -> Future[Any]:
        def load() -> Any:
            kernel = compile_variant()
            kernel.run  # noqa: B018 - a property, which builds what launches it with the C compiler and loads both
            return kernel

        return self._pool.submit(load)


@contextmanager
def compiling_in_parallel(device: torch.device, num_ranks: int) -> Iterator[None]:
    """What this thread launches for the first time compiles in others; the end waits until all is compiled and loaded.

    num_ranks: how many share this host's cores. A variant that fails to compile says so when it is really launched.
    Does nothing without a GPU, or with a Triton that can't (before 3.6).
    """
    if device.type != "cuda" or not _COMPILES_ASIDE:
        yield
        return
    num_threads = max(len(os.sched_getaffinity(0)) // num_ranks, 1)
    with ThreadPoolExecutor(num_threads, "nanollm-compile", torch.cuda.set_device, (device,)) as pool:
        compiling = triton.AsyncCompileMode(_Loader(pool), ignore_errors=True)
        try:
            with compiling:
                try:
                    yield
                    wait(compiling.raw_futures)
                except BaseException:  # Ctrl-C too: what nobody works on yet is left, and nobody waits for it
                    for future in compiling.raw_futures:
                        future.cancel()
                    compiling.raw_futures.clear()
                    raise
        finally:
            for kernel in compiling.future_kernels.values():
                if kernel.kernel is None:
                    kernel.finalize_compile(None)  # unknown again: whoever launches it compiles it


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Inside, this thread's launches of Triton kernels compile the variant and run nothing: outputs are what they were.

    So a step can be gone through before there is anything to compute with.
    """
    caller = threading.get_ident()
    with _one_at_a_time:
        run = triton.JITFunction.run

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            warmup = warmup or threading.get_ident() == caller
            kernel = run(self, *args, grid=grid, warmup=warmup, **options)
            if hasattr(kernel, "finalize_compile"):
                kernel.finalize_compile(kernel)  # known from now on: to find it is quicker than to name it again
            return kernel

        triton.JITFunction.run = compile_only
        try:
            yield
        finally:
            triton.JITFunction.run = run
