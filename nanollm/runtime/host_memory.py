"""What memory there is on this host, and for the container that this process may run in. Knows nothing of PyTorch."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Bytes. total: of the host. limit: what the container's processes may use together, None without a limit.
    available: what this process could still take without swapping, as Linux estimates it, within that limit."""

    total: int
    limit: int | None
    available: int


def host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Reads them anew. A container's limit is found where Linux says it by control groups of version 2."""
    found = dict(re.findall(r"^(\w+): *(\d+) kB$", meminfo.read_text(), re.MULTILINE))
    total, available = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    file = cgroup / "memory.max"
    text = file.read_text().strip() if file.exists() else "max"
    if text == "max":
        return HostMemory(total, None, available)
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    # Copies of files go when memory is wanted.
    used = int((cgroup / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
    return HostMemory(total, int(text), max(min(available, int(text) - used), 0))
