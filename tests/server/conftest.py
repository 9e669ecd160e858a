"""One server for all tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.server_process import ServerProcess


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[ServerProcess]:
    template = Path(__file__).parent / "tools.jinja"
    flags = ("--num-kv-blocks", 512, "--max-num-seqs", 16, "--max-waiting", 600, "--chat-template", template)
    with ServerProcess(smollm2_path, *flags, name="smollm2") as server:
        yield server
