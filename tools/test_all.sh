#!/usr/bin/env bash
# Tests by several workers; a file's tests stay in one, and the files of tests/longest.txt come first. `short` leaves out
# the long ones (tests/support/longest.py). `all` has every one; then those that tests/unsteady.txt lists, three times
# each, and those that hold a cost against a bound, with nothing beside them. A failure fails the run: nothing is run
# again to become green.
# Usage: tools/test_all.sh PYTHON short|all
set -euo pipefail
python=$1
extent=$2
status=0
# two more than affinity and control groups allow cores: tests of processes wait for most of their time
workers=$("$python" -c 'from penstock.machine.cores import usable_cores; print(min(8, usable_cores() + 2))')
marks="not soak and not speed"
[ "$extent" = all ] || marks+=" and not long"

mapfile -t unsteady < <(awk '!/^[[:space:]]*(#|$)/ { print $1 }' tests/unsteady.txt)
deselected=("${unsteady[@]/#/--deselect=}")
"$python" -m pytest -p no:cacheprovider -m "$marks" "${deselected[@]}" \
    --numprocesses "$workers" --dist loadfile --no-loadscope-reorder --durations 15 || status=$?

if [ "$extent" != all ]; then
    echo "==> Left out: long files (tests/longest.txt), costs (mark speed), tests/unsteady.txt. \`make test-all\` runs them too."
    exit "$status"
fi

if [ ${#unsteady[@]} -gt 0 ]; then
    echo "==> Unsteady tests (tests/unsteady.txt), three times each"
    for _ in 1 2 3; do
        "$python" -m pytest -p no:cacheprovider "${unsteady[@]}" || status=$?
    done
fi

echo "==> Costs"
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.speed' tests) # to collect all takes as long as to run these
"$python" -m pytest -p no:cacheprovider -m speed "${files[@]}" || status=$?
exit "$status"
