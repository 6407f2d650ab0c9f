#!/usr/bin/env bash
# Every test, by a worker for each core; a file's tests stay in one. One builds a wheel, which compiles the engine for
# minutes: it runs beside the others, at low priority. Those that hold a cost against a bound come last, with nothing
# beside them.
# Usage: tools/test_all.sh PYTHON
set -euo pipefail
python=$1
alone=tests/repository/test_wheel.py
log=$(mktemp)
nice -n 19 "$python" -m pytest "$alone" >"$log" 2>&1 &
wheel=$!
trap 'kill "$wheel" 2>/dev/null || true; rm -f "$log"' EXIT
status=0
"$python" -m pytest --ignore "$alone" -m "not soak and not speed" \
  --numprocesses logical --maxprocesses 8 --dist loadfile || status=$?
echo "==> The wheel, built and tried meanwhile"
wait "$wheel" || status=$?
cat "$log"
echo "==> Costs"
"$python" -m pytest -m speed || status=$?
exit "$status"
