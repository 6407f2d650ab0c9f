"""A client that submits jobs at a rate: `python -m bench._server_submit URL TOKEN COUNT PER_S` (0: one after another).

Prints one JSON line for each: the job's id, when the request was sent and when the answer came (`time.monotonic`, which
all processes of a machine share). A request that falls behind is sent as soon as the one before is answered.
"""

from __future__ import annotations

import json
import sys
import time

import httpx

SPEC = {"name": "bench", "entrypoint": ["true"], "trainers": {"count": 1, "cpus": 1, "memory": "1GiB"}}


def main(url: str, token: str, count: int, per_s: float) -> None:
    """Submit."""
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
        began = time.monotonic()
        for number in range(count):
            if per_s:
                time.sleep(max(0.0, began + number / per_s - time.monotonic()))
            sent_at = time.monotonic()
            answer = http.post("/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": f"{began}-{number}"})
            answer.raise_for_status()
            print(json.dumps([answer.json()["id"], sent_at, time.monotonic()]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
