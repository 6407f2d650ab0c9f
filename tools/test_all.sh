#!/usr/bin/env bash
# Every test, by a worker for each core; a file's tests stay in one. Those that hold a cost against a bound come last,
# with nothing beside them.
# A test with leases and time limits may fail because the others kept it from the processor. What has failed is run
# again, once, with nothing beside it: what fails alone fails all of it, what does not is named for whoever tends it.
# Usage: tools/test_all.sh PYTHON
set -euo pipefail
python=$1
crowd=0
"$python" -m pytest --cache-clear -m "not soak and not speed" \
    --numprocesses logical --maxprocesses 8 --dist loadfile || crowd=$?
status=0
if [ "$crowd" -eq 1 ]; then # some have failed; any other status says that the run itself was no good
    echo "==> Those that failed, again, with nothing beside them"
    crowd=0
    "$python" -m pytest --last-failed --last-failed-no-failures none --maxfail 5 \
        -m "not soak and not speed" -rA --tb short || crowd=$?
    [ "$crowd" -ne 0 ] || echo "They pass alone: their limits are too narrow for a busy machine."
fi
[ "$crowd" -eq 0 ] || status=$crowd
echo "==> Costs"
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.speed' tests) # to collect all takes as long as to run these
"$python" -m pytest -p no:cacheprovider -m speed "${files[@]}" || status=$?
exit "$status"
