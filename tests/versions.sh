#!/usr/bin/env bash
# Runs the test suite on several versions of torch and Python, each in a virtual environment of its own outside of the repository.
#
#   tests/versions.sh                         torch 2.11 to 2.15 on Python 3.11, and torch 2.13 on Python 3.10, 3.12 and 3.13
#   tests/versions.sh 2.15.0 2.13.0@3.12      these versions of torch, with "@" on this Python; without it on 3.11
#   tests/versions.sh --prepare 2.15.0        make the environments, run no tests
#   tests/versions.sh 2.15.0 -- -m upstream   arguments for pytest after "--"; without any the default suite
#   tests/versions.sh --long 2.15.0           one file of ranks, one of Inductor, and a sample of tests/conformance
#
# GRADREWRITE_VENVS is the folder of the environments (default: ~/.cache/gradrewrite/venvs); they are kept and reused.
# The interpreters are python3.10 to python3.13 on the PATH. CPU builds of torch are taken from PyTorch's index where it can
# be reached; PyPI has CUDA builds, whose libraries are installed only if torch cannot be imported without them.
# docs/compatibility.md has the results.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/.."
venvs=${GRADREWRITE_VENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/gradrewrite/venvs}
cpu_index=https://download.pytorch.org/whl/cpu

versions=()
arguments=()
prepare_only=false
long=(-m "not cuda and not launches" tests/integration/distributed/test_training.py
  tests/integration/inductor/test_inductor.py tests/conformance)
while [ $# -gt 0 ]; do
  case $1 in
    --prepare) prepare_only=true ;;
    --long)
      arguments=("${long[@]}")
      export OMP_NUM_THREADS=1 GRADREWRITE_SAMPLE="${GRADREWRITE_SAMPLE:-$(($(git rev-list --count HEAD) / 50))}"
      ;;
    --) shift && arguments=("$@") && break ;;
    -*) echo "unknown option: $1" >&2 && exit 2 ;;
    *) versions+=("$1") ;;
  esac
  shift
done

requirements() { # of gradrewrite and its tests, without torch and without triton, which is for one version of it
  "$1" - << 'END'
import re

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
found = [*project["dependencies"], *project["optional-dependencies"]["test"]]
print("\n".join(one for one in found if not re.match(r"(torch|gradrewrite|triton)\b", one)))
END
}

install_torch() { # $1 the environment's python, $2 the version
  "$1" -m pip install --quiet --no-deps --retries 1 --timeout 20 --extra-index-url "$cpu_index" "torch==$2+cpu" 2> /dev/null ||
    "$1" -m pip install --quiet --no-deps "torch==$2"
  "$1" - << 'END' > "$venv/torch-requirements.txt"
from importlib.metadata import requires

lines = (line for line in requires("torch") or [] if "extra ==" not in line)
print("\n".join(line for line in lines if not line.startswith(("nvidia", "cuda", "triton", "setuptools"))))
END
  "$1" -m pip install --quiet -r "$venv/torch-requirements.txt" "setuptools>=77"
  "$1" -c "import torch" 2> /dev/null || "$1" -m pip install --quiet "torch==$2"
}

prepare() { # $1 version of torch, $2 of Python; sets $venv
  venv=$venvs/torch-$1-python-$2
  local own=$venv/bin/python
  if ! [ -e "$venv/complete" ]; then
    rm -rf "$venv"
    mkdir -p "$venvs"
    "python$2" -m venv "$venv"
    install_torch "$own" "$1"
    requirements "$own" > "$venv/requirements.txt"
    "$own" -m pip install --quiet -r "$venv/requirements.txt"
    touch "$venv/complete"
  fi
  "$own" -m pip install --quiet --no-deps --no-build-isolation -e .
  "$own" -c 'import sys, torch; print("torch", torch.__version__, "Python", sys.version.split()[0])'
}

if [ ${#versions[@]} = 0 ]; then
  versions=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0 2.13.0@3.10 2.13.0@3.12 2.13.0@3.13)
fi

if [ ${#versions[@]} = 1 ]; then
  [[ ${versions[0]} == *@* ]] || versions=("${versions[0]}@3.11")
  echo "== torch ${versions[0]%@*}, Python ${versions[0]#*@}"
  prepare "${versions[0]%@*}" "${versions[0]#*@}"
  if ! $prepare_only; then
    TORCHINDUCTOR_CACHE_DIR="$venv/inductor" "$venv/bin/python" -m pytest ${arguments[@]+"${arguments[@]}"}
  fi
  exit
fi

failed=()
for version in "${versions[@]}"; do # each in a shell of its own, so that one that fails does not stop the others
  if $prepare_only; then
    "$script" --prepare "$version" || failed+=("$version")
  else
    "$script" "$version" -- ${arguments[@]+"${arguments[@]}"} || failed+=("$version")
  fi
done
if [ ${#failed[@]} != 0 ]; then
  echo "failed on torch ${failed[*]}" >&2
  exit 1
fi
