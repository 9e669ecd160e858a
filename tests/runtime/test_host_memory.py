"""Memory of the host, and of the container that one runs in."""

from pathlib import Path

import psutil
import pytest

from nanollm.runtime.host_memory import HostMemory, host_memory

MIB = 2**20


def test_the_host_says_what_psutil_says() -> None:
    found, expected = host_memory(), psutil.virtual_memory()
    assert found.total == expected.total
    assert found.available == pytest.approx(min(expected.available, found.limit or expected.total), rel=0.1)


@pytest.mark.parametrize(
    ("limit", "current", "expected"),
    [
        ("max", 900, HostMemory(8000 * MIB, None, 6000 * MIB)),
        (f"{1000 * MIB}", 900, HostMemory(8000 * MIB, 1000 * MIB, 300 * MIB)),  # 200 of the 900 are files' copies
        (f"{1000 * MIB}", 1300, HostMemory(8000 * MIB, 1000 * MIB, 0)),
        (f"{9000 * MIB}", 900, HostMemory(8000 * MIB, 9000 * MIB, 6000 * MIB)),
    ],
)
def test_a_container_bounds_it(tmp_path: Path, limit: str, current: int, expected: HostMemory) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:  {8000 * 1024} kB\nMemFree: 1 kB\nMemAvailable:   {6000 * 1024} kB\n")
    assert host_memory(meminfo, tmp_path) == HostMemory(8000 * MIB, None, 6000 * MIB)
    for name, text in [
        ("max", limit),
        ("current", str(current * MIB)),
        ("stat", f"anon {current * MIB}\ninactive_file {200 * MIB}\nactive_file 5"),
    ]:
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    assert host_memory(meminfo, tmp_path) == expected
