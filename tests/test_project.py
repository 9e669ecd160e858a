"""The promises of the code as a whole: which room may import which, a quick `import nanollm`, a README that is true."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room may import itself and rooms of a greater depth; rooms of one depth don't import each other.
DEPTH = {
    "": 0,  # nanollm/__init__.py
    "cli": 1,
    "commands": 2,
    "server": 3,
    "async_engine": 4,
    "llm": 5,
    "text": 6,
    "engine": 6,
    "runtime": 7,
    "models": 8,
    "layers": 9,
    "distributed": 10,
    "kernels": 11,
    "outputs": 12,
    "config": 12,
    "sampling_params": 13,
}
ANYWHERE = ("pickle", "cloudpickle", "dill", "torch.load")
BARRED = {"engine": ("torch", "transformers", "tokenizers", "nanollm.models", "nanollm.layers", "nanollm.kernels")}


def room_of(module: str) -> str:
    """nanollm.engine.scheduler -> engine; the package itself, or a public name of it, -> the empty string."""
    _, room, *_ = [*module.split("."), ""]
    return room if room in DEPTH else ""


def type_only(tree: ast.AST) -> set[ast.AST]:
    """Every node under `if TYPE_CHECKING:`."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {node for block in blocks for statement in block.body for node in ast.walk(statement)}


def used_names(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Dotted names that the source imports, or reads from a module it imported: torch.distributed.barrier."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = ("nanollm.relative_import" if node.level else node.module) or ""
            yield from ((node, f"{origin}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch(\.\w+)+", name := ast.unparse(node)):
            yield node, name


def is_under(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def violations(module: str, source: str) -> list[str]:
    """What `source`, were it the module of this dotted name, imports or uses against the rules."""
    tree, room, found = ast.parse(source), room_of(module), []
    hints = type_only(tree)
    for node, name in used_names(tree):
        where = f"{module}:{node.lineno}: {name}"
        if is_under(name, "nanollm.relative_import"):
            found.append(f"{where}: write absolute imports")
        elif is_under(name, "nanollm") and name != "nanollm":
            other = room_of(name)
            if other != room and DEPTH[other] <= DEPTH[room] and not (room in ("cli", "commands") and other == ""):
                found.append(f"{where}: {room} must not import {other or 'the package'}")
        if is_under(name, "torch.distributed") and room != "distributed":
            found.append(f"{where}: only nanollm.distributed uses torch.distributed")
        if any(is_under(name, unsafe) for unsafe in ANYWHERE):
            found.append(f"{where}: runs code from data")
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and node not in hints
        if is_import and any(is_under(name, barred) for barred in BARRED.get(room, ())):
            found.append(f"{where}: {room} must not need it")
    return found


def test_rooms_import_downward_only() -> None:
    files = sorted((ROOT / "nanollm").rglob("*.py"))
    assert files
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    assert [line for module, file in modules.items() for line in violations(module, file.read_text())] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nanollm.kernels.norm", "from nanollm.layers.linear import LinearBase"),
        ("nanollm.layers.linear", "import nanollm.models"),
        ("nanollm.runtime.executor", "def start():\n    from nanollm.engine import scheduler"),
        ("nanollm.text.tokenizer", "from nanollm.engine.sequence import Sequence"),
        ("nanollm.engine.sequence", "from nanollm import text"),
        ("nanollm.llm", "from nanollm import LLM"),
        ("nanollm.server.app", "from nanollm.commands.flags import default_model"),
        ("nanollm.config", "from nanollm.runtime.step_plan import StepPlan"),
        ("nanollm.sampling_params", "from nanollm.config import EngineConfig"),
        ("nanollm.engine.scheduler", "from . import sequence"),
        ("nanollm.engine.scheduler", "import torch"),
        ("nanollm.engine.scheduler", "from torch.cuda import Event"),
        ("nanollm.engine.scheduler", "from nanollm.models.qwen3 import Qwen3"),
        ("nanollm.runtime.channel", "import torch.distributed as dist"),
        ("nanollm.runtime.channel", "from torch import distributed"),
        ("nanollm.runtime.channel", "import torch\ntorch.distributed.barrier()"),
        ("nanollm.models.loader", "import torch\nweights = torch.load('x')"),
        ("nanollm.runtime.channel", "import pickle"),
    ],
)
def test_a_forbidden_import_is_caught(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nanollm.cli", "import nanollm\nfrom nanollm.llm import LLM"),
        ("nanollm.engine.engine_core", "from nanollm.runtime.executor import Executor"),
        ("nanollm.engine.engine_core", "from nanollm.engine.scheduler import Scheduler"),
        ("nanollm.engine.sequence", "if TYPE_CHECKING:\n    import torch\nlogits: list[torch.Tensor]"),
        ("nanollm.kernels.norm", "from nanollm.config import ModelConfig\nimport torch"),
        ("nanollm.config", "from nanollm.sampling_params import check_int"),
        ("nanollm.distributed.group", "import torch.distributed as dist"),
        ("nanollm.runtime.executor", "import torch.multiprocessing"),
    ],
)
def test_an_import_that_follows_the_arrows_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_import_is_quick_and_loads_no_heavy_package() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import nanollm; print(time.perf_counter() - start,"
        " *sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    results = [run.stdout.split() for run in runs]
    assert [heavy for _, *heavy in results] == [[], [], []]
    assert min(float(seconds) for seconds, *_ in results) < 0.3


def test_every_public_name_loads() -> None:
    import nanollm

    for name in nanollm.__all__:
        assert getattr(nanollm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        nanollm.LMM  # noqa: B018


def test_readme_names_the_launch_commands_and_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "./launch.sh generate" in readme
    assert "./launch.sh test" in readme
    named = re.findall(r"\b(?:docs|examples|bench|nanollm)/[\w./-]*\w|\b[A-Z]{4,}\.md\b", readme)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them all as top-level modules."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
