#!/usr/bin/env bash
# Every test, those that .ci/run draws too, in the environment of .ci/run (or another one with the same packages).
#
#   tests/nightly.sh                                    all of it
#   tests/nightly.sh --shard=3/20 --record=FILE         a twentieth; FILE has the outcomes, and a run goes on where it stopped
#   tests/nightly.sh tests/conformance                  further arguments go to pytest
#
# With --shard or --record the tests for a simulated GPU are in it too, in processes of their own.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HYPOTHESIS_PROFILE=nightly GRADREWRITE_SAMPLE=all
failed=0
run() { # arguments of pytest; a shard without tests is no failure
  local code=0
  pytest "$@" || code=$?
  [ "$code" = 0 ] || [ "$code" = 5 ] || failed=1
}
run -m "not cuda and not launches" "$@"
GRADREWRITE_GPU=interpreted run -m cuda "$@"
GRADREWRITE_GPU=compiled run -m launches "$@"
exit $failed
