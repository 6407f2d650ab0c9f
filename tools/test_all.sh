#!/usr/bin/env bash
# Every test, by a worker for each core; a file's tests stay in one. One builds a wheel, which compiles the engine for
# minutes: it runs beside the others, at low priority. Those that hold a cost against a bound come last, with nothing
# beside them.
# A test with leases and time limits may fail because the others kept it from the processor. What has failed is run
# again, once, with nothing beside it: what fails alone fails all of it, what does not is named for whoever tends it.
# Usage: tools/test_all.sh PYTHON
set -euo pipefail
python=$1
alone=tests/repository/test_wheel.py
log=$(mktemp)
# shellcheck disable=SC2329  # called by the trap
tidy() {
    kill "$wheel" 2>/dev/null || true
    rm -f "$log"
}
nice -n 19 "$python" -m pytest -p no:cacheprovider "$alone" >"$log" 2>&1 &
wheel=$!
trap tidy EXIT
crowd=0
"$python" -m pytest --cache-clear --ignore "$alone" -m "not soak and not speed" \
    --numprocesses logical --maxprocesses 8 --dist loadfile || crowd=$?
echo "==> The wheel, built and tried meanwhile"
status=0
wait "$wheel" || status=$?
cat "$log"
if [ "$crowd" -eq 1 ]; then # some have failed; any other status says that the run itself was no good
    echo "==> Those that failed, again, with nothing beside them"
    crowd=0
    "$python" -m pytest --last-failed --last-failed-no-failures none --maxfail 5 \
        -m "not soak and not speed" -rA --tb short || crowd=$?
    [ "$crowd" -ne 0 ] || echo "They pass alone: their limits are too narrow for a busy machine."
fi
[ "$crowd" -eq 0 ] || status=$crowd
echo "==> Costs"
"$python" -m pytest -p no:cacheprovider -m speed || status=$?
exit "$status"
