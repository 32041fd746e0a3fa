#!/usr/bin/env bash
# What does not fit into .ci/run: the tests marked nightly, in the environment of .ci/run (or another one with the same packages).
# Arguments go to pytest: tests/nightly.sh tests/conformance
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HYPOTHESIS_PROFILE=nightly
pytest -m "nightly and not cuda and not launches" --dist=worksteal "$@"
if [ $# = 0 ]; then
  GRADREWRITE_GPU=interpreted pytest -m "nightly and cuda" --dist=worksteal
  GRADREWRITE_GPU=compiled pytest -m "nightly and launches" --dist=worksteal
fi
