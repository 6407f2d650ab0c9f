"""Write the golden telemetry frames: `NAME.bin` (one frame) and `NAME.json` (what it must decode to).

Run `python tests/golden/frames/make.py` from the repository root. The same files hold the Python codec
(`penstock.protocol.frames`) and the TypeScript codec (`web/src/codec.ts`) to one another. The bytes are laid out
here by hand with `struct`, not with the codec, so that the codec is judged and not copied.

In the JSON, 64-bit integers (header fields t0_ns, seq, step; columns of dtype <u8 and <i8) are decimal strings,
because a JavaScript number cannot hold them; a float that is not finite is the string "NaN", "Infinity" or
"-Infinity"; everything else is a number. `columns` is {} for a JSON frame and `body` null for the others.
`refused/NAME.bin` must be refused by every decoder; `refused/reasons.json` says why.
"""

from __future__ import annotations

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KIND = {
    "HELLO": 1, "GRAPH": 2, "OP_EVENTS": 3, "OP_SUMS": 4, "METRICS": 5, "SYNC": 6, "GAP": 7, "PROGRESS": 8,
    "SCALARS": 9, "GOODBYE": 10, "LOG": 11, "GRAPH_USED": 12, "EXCHANGE": 13,
    "INPUT_EVENTS": 14,
}  # fmt: skip
DTYPE_CODE = {"<u1": 1, "<u2": 2, "<u4": 3, "<u8": 4, "<i8": 5, "<f4": 6, "<f8": 7}
FORMAT = {"<u1": "B", "<u2": "H", "<u4": "I", "<u8": "Q", "<i8": "q", "<f4": "f", "<f8": "d"}
COLUMN = {
    "JSON": (0, "<u1"), "START_NS": (1, "<u4"), "DURATION_NS": (2, "<u4"), "OP": (3, "<u2"), "THREAD": (4, "<u2"),
    "COUNT": (5, "<u4"), "TOTAL_NS": (6, "<u8"), "MAX_NS": (7, "<u4"), "STEP": (8, "<u8"), "TIME_NS": (9, "<i8"),
    "LOSS": (10, "<f8"), "SAMPLES": (11, "<u4"), "STEP_NS": (12, "<u8"), "SYNC_BYTES": (13, "<u8"),
    "SYNC_NS": (14, "<u8"), "PARAM": (15, "<u2"), "BYTES": (16, "<u8"), "WAIT_NS": (17, "<u8"), "TEXT": (18, "<u1"),
    "WORK": (19, "<u1"),
}  # fmt: skip
T0_NS = 1_790_000_000_123_456_789
Columns = dict[str, list[int] | list[float]]


def layout(kind: str, columns: Columns, *, count: int, **head: int) -> bytes:
    """Return the bytes of one frame, following the table in `penstock.protocol.frames`."""
    descriptors, data = b"", b""
    for name, values in columns.items():
        column_id, dtype = COLUMN[name]
        raw = struct.pack(f"<{len(values)}{FORMAT[dtype]}", *values)
        descriptors += struct.pack("<BBHI", DTYPE_CODE[dtype], column_id, 0, len(raw))
        data += raw + b"\0" * (-len(raw) % 8)
    body = descriptors + data
    return (
        struct.pack("<HBBBBH", 0x5350, 1, KIND[kind], head["flags"], len(columns), 0)
        + struct.pack("<IIQ", head["stream"], head["epoch"], head["seq"])
        + struct.pack("<qQII", head["t0_ns"], head["step"], count, len(body))
        + body
    )  # fmt: skip


def readable(value: float, dtype: str) -> int | float | str:
    """Return a value as it stands in the JSON file."""
    if dtype in ("<u8", "<i8"):
        return str(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def readable_column(name: str, values: list[int] | list[float]) -> dict[str, Any]:
    """Return a column as it stands in the JSON file."""
    return {"dtype": COLUMN[name][1], "values": [readable(value, COLUMN[name][1]) for value in values]}


def write(name: str, kind: str, content: Columns | dict[str, Any], *, seq: int, step: int = 0, flags: int = 0) -> None:
    """Write one pair of files. `content`: columns, or the object of a JSON frame."""
    head = {"stream": 7, "epoch": 2, "seq": seq, "t0_ns": T0_NS, "step": step, "flags": flags}
    is_json = kind not in ("OP_EVENTS", "OP_SUMS", "METRICS", "SYNC", "LOG", "INPUT_EVENTS")
    columns: Columns = content
    if is_json:
        text = json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
        columns = {"JSON": list(text)}
    count = 1 if is_json else len(next(iter(columns.values())))
    (HERE / f"{name}.bin").write_bytes(layout(kind, columns, count=count, **head))
    document = {
        "kind": kind, "stream": 7, "epoch": 2, "seq": str(seq), "t0_ns": str(T0_NS), "step": str(step), "flags": flags,
        "count": count, "body": content if is_json else None,
        "columns": {} if is_json else {key: readable_column(key, values) for key, values in columns.items()},
    }  # fmt: skip
    (HERE / f"{name}.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def graph_document() -> dict[str, Any]:
    """Return a graph document of three handles on two replicas, with one gradient exchange."""

    def op(name: str, kind: str, role: str, replica: int, reads: str, writes: str) -> dict[str, Any]:
        value = {"dtype": "float32", "shape": [4, 2]}
        return {
            "name": name, "type": f"aten.{name.split('_')[0]}.default", "kind": kind, "role": role, "replica": replica,
            "module": "tower.fc_0", "source": "train.py:41", "inputs": [{"name": reads, **value}],
            "outputs": [{"name": writes, **value}], "bytes": 64, "flops": 128,
        }  # fmt: skip

    return {
        "version": 1, "program": "ctr – 流体", "mode": "reduce", "num_replicas": 2, "num_threads": 2, "batch": [4, 3],
        "ops": [
            op("mm_0", "computation", "backward", 0, "x", "w@GRAD"),
            op("mm_1", "computation", "backward", 1, "x", "w@GRAD"),
            op("reduce_0", "reduce", "communication", -1, "w@GRAD", "w@GRAD"),
        ],
        "edges": [[0, 2], [1, 2]],
        "syncs": [
            {
                "parameter": "w", "gradient": "w@GRAD", "mode": "reduce",
                "owner": 0, "bytes": 32, "sparse": False, "ops": [2],
            }
        ],
    }  # fmt: skip


def op_events(seed: int, rows: int) -> Columns:
    """Return the columns of one step's events: two threads, operators back to back."""
    draw = random.Random(seed)
    start = [draw.randrange(0, 8_000_000) for _ in range(rows)]
    duration = [draw.randrange(400, 2_000_000) for _ in range(rows)]
    return {
        "START_NS": sorted(start), "DURATION_NS": duration,
        "OP": [draw.randrange(0, 300) for _ in range(rows)], "THREAD": [i % 2 for i in range(rows)],
    }  # fmt: skip


def main() -> None:
    """Write every file."""
    draw = random.Random(20)
    hello = {"role": "trainer", "index": 0, "host": "node-a", "pid": 4242, "program": "ctr", "version": "0.1.0"}
    write("hello", "HELLO", hello, seq=0)
    write("graph", "GRAPH", graph_document(), seq=1)
    write("graph_used", "GRAPH_USED", {"hash": "ab" * 32}, seq=2)
    write("op_events", "OP_EVENTS", op_events(3, 13), seq=3, step=17, flags=1)
    write("op_events_empty", "OP_EVENTS", {"START_NS": [], "DURATION_NS": [], "OP": [], "THREAD": []}, seq=4, step=18)
    limits: Columns = {
        "START_NS": [0, 2**32 - 1],
        "DURATION_NS": [2**32 - 1, 0],
        "OP": [65535, 0],
        "THREAD": [0, 65535],
    }
    write("op_events_limits", "OP_EVENTS", limits, seq=2**64 - 1, step=2**64 - 1, flags=1)
    write("op_sums", "OP_SUMS", {
        "OP": list(range(5)), "COUNT": [draw.randrange(1, 99) for _ in range(5)],
        "TOTAL_NS": [draw.randrange(2**33, 2**53 + 2**52) for _ in range(5)],
        "MAX_NS": [draw.randrange(0, 2**32) for _ in range(5)],
    }, seq=5)  # fmt: skip
    write("metrics", "METRICS", {
        "STEP": [0, 50, 2**60], "TIME_NS": [T0_NS, T0_NS + 1, -1], "LOSS": [0.693359375, math.nan, math.inf],
        "SAMPLES": [1000, 50_000, 0], "STEP_NS": [14_200_000, 2**40, 0], "SYNC_BYTES": [3_200_000, 2**41 + 1, 0],
        "SYNC_NS": [410_000, 2**35, 0],
    }, seq=6)  # fmt: skip
    write("sync", "SYNC", {
        "PARAM": [0, 1, 65535], "COUNT": [9, 9, 1], "BYTES": [288, 0, 2**63], "TOTAL_NS": [120_000, 77, 1],
        "WAIT_NS": [54_321, 0, 2**63 + 1],
    }, seq=7)  # fmt: skip
    write("gap", "GAP", {"OP_EVENTS": 4096, "OP_SUMS": 3}, seq=8)
    write("progress", "PROGRESS", {"done": 120, "total": 1000, "unit": "steps"}, seq=9)
    write("scalars", "SCALARS", {"step": 303, "time_ns": T0_NS, "values": {"auc": 0.7875, "grad_norm": None}}, seq=10)
    write("goodbye", "GOODBYE", {}, seq=11)
    write("log", "LOG", {"TEXT": list("pass 1: AUC 0.77 – ✓\n".encode())}, seq=12, step=8192, flags=2)
    write("exchange", "EXCHANGE", {
        "peers": ["127.0.0.1:6174", "127.0.0.1:6175"], "blocks": ["", "fc_0.w_0.block0"],
        "rows": [[0, 0, 40, 0, 0, 9_000_000, 0, 0, 0], [1, 1, 20, 2**40, 2**41, 5_000_000, 1, 3, 2]],
    }, seq=13, step=20)  # fmt: skip
    write("input_events", "INPUT_EVENTS", {
        "START_NS": [0, 2**32 - 1, 7], "DURATION_NS": [2**32 - 1, 0, 40_000], "WORK": [0, 1, 2],
        "THREAD": [2**15, 0, 65535],
    }, seq=14, step=21)  # fmt: skip
    refused()


def refused() -> None:
    """Write frames that no decoder may accept."""
    folder = HERE / "refused"
    folder.mkdir(exist_ok=True)
    head = {"stream": 7, "epoch": 2, "seq": 1, "t0_ns": T0_NS, "step": 0, "flags": 0}
    good = layout("OP_SUMS", {"OP": [1], "COUNT": [2], "TOTAL_NS": [3], "MAX_NS": [4]}, count=1, **head)
    cases = {
        "empty": (b"", "no bytes at all"),
        "half_a_header": (good[:20], "the header is cut"),
        "truncated": (good[:-1], "the last byte is missing"),
        "trailing": (good + b"\0" * 8, "bytes follow the frame"),
        "magic": (b"XX" + good[2:], "foreign magic"),
        "version": (good[:2] + b"\x02" + good[3:], "unknown version"),
        "kind": (good[:3] + b"\x63" + good[4:], "unknown kind 99"),
        "num_columns": (good[:5] + b"\xff" + good[6:], "descriptors reach beyond the frame"),
        "dtype": (good[:48] + b"\x63" + good[49:], "unknown dtype code 99"),
        "column": (good[:49] + b"\x63" + good[50:], "unknown column 99"),
        "wrong_dtype": (good[:48] + b"\x03" + good[49:], "column OP as u32"),
        "column_bytes": (good[:52] + b"\xff\xff\xff\xff" + good[56:], "a column longer than the frame"),
        "rows": (good[:40] + b"\x02" + good[41:], "the header promises 2 rows, the columns have 1"),
        "missing_column": (layout("OP_SUMS", {"OP": [1], "COUNT": [2]}, count=1, **head), "two columns are missing"),
        "json_broken": (layout("GAP", {"JSON": list(b'{"a":')}, count=1, **head), "the JSON is cut"),
        "json_array": (layout("GAP", {"JSON": list(b"[1]")}, count=1, **head), "the JSON is no object"),
        "json_nan": (layout("SCALARS", {"JSON": list(b'{"a":NaN}')}, count=1, **head), "NaN is no JSON"),
        "json_utf16": (layout("GAP", {"JSON": list("{}".encode("utf-16"))}, count=1, **head), "not UTF-8"),
    }
    for name, (frame, _) in cases.items():
        (folder / f"{name}.bin").write_bytes(frame)
    reasons = {name: reason for name, (_, reason) in cases.items()}
    (folder / "reasons.json").write_text(json.dumps(reasons, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
