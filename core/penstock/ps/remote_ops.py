"""Torch operators of trainer programs that exchange with parameter servers, through the open `remotes`.

The executors run them as any other operator: serially, or when their inputs are ready. Each takes tokens (empty
tensors) of what precedes it and returns one, so that the order of a step (send, send barrier, recv, fetch barrier) is a
data dependency. They hold the interpreter lock, and release it while they wait.

`send_step`, `recv_step`, `prefetch`, `geo` and `geo_step` have kernels without the interpreter (`native/src/ps`), which
hand over to the ones here, `…_by_python`, until their remote is open, and whenever something goes wrong or, of GEO, an
exchange begins or has ended. `send_ahead` does nothing without its native kernel.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.native.channels import know_layout, meets, repeats_step
from penstock.ps.communicator import remotes
from penstock.ps.remote import GeoCall, SendCall


def _token() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def _cpu(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().cpu().contiguous() for t in tensors]


def _send(values: list[Tensor], remote: str, variable: str, blocks: list[str], at: list[int]) -> Tensor:
    remotes.get(remote).send(variable, blocks, at, _cpu(values))
    return _token()


def _send_rows(
    rows: Tensor, values: Tensor, remote: str, variable: str, blocks: list[str], at: list[int], heights: list[int]
) -> Tensor:
    remotes.get(remote).send_rows(variable, blocks, at, heights, *_cpu([rows, values]))
    return _token()


def _send_barrier(after: list[Tensor], remote: str) -> Tensor:
    remotes.get(remote).send_barrier()
    return _token()


_Dense = tuple[str, list[str], list[int], int]
_Sparse = tuple[str, list[str], list[int], list[int]]
_Pieces = tuple[int, list[tuple[int, int, int]]]


@cache
def _specs(spec: str) -> tuple[list[_Dense], list[_Sparse], list[_Pieces] | None]:
    """Read the layout of `send_step`'s tensors: of dense gradients (variable, blocks, servers, how many).

    The last: of each sparse gradient its width, and its pieces: which of `rows`, which of `row_values`, first column.
    None: each has one of both.
    """
    found = json.loads(spec)
    pieces = found.get("pieces")
    return (
        [tuple(of) for of in found["dense"]],
        [tuple(of) for of in found["sparse"]],
        None if pieces is None else [(width, [tuple(one) for one in of]) for width, of in pieces],
    )


def _joined(rows: list[Tensor], values: list[Tensor], pieces: _Pieces) -> tuple[Tensor, Tensor]:
    width, of = pieces
    ids = torch.cat([rows[at].reshape(-1) for at, _, _ in of])
    return ids, torch.cat([values[at][:, first : first + width] for _, at, first in of])


def _send_step(
    values: list[Tensor], rows: list[Tensor], row_values: list[Tensor], after: list[Tensor], remote: str, spec: str
) -> Tensor:
    dense, sparse, given = _specs(spec)
    pieces = given or [(of.shape[-1], [(at, at, 0)]) for at, of in enumerate(row_values)]
    know_layout(
        spec,
        [(blocks, at, []) for _, blocks, at, _ in dense],
        [((blocks, at, heights), of) for (_, blocks, at, heights), of in zip(sparse, pieces, strict=True)],
    )
    if meets(remote):  # and now the layout is known there
        together: Tensor = torch.ops.penstock.send_step(
            _cpu(values), _cpu(rows), _cpu(row_values), _cpu(after), remote, spec
        )
        return together
    if given:
        joined = [_joined(rows, row_values, of) for of in given]
        rows, row_values = [ids for ids, _ in joined], [of for _, of in joined]
    pushes = _pushes(spec, values, rows, row_values)
    remotes.get_step(remote, opens=not repeats_step()).send_step(pushes)
    return _token()


def _pushes(spec: str, values: list[Tensor], rows: list[Tensor], row_values: list[Tensor]) -> list[SendCall]:
    """Return the pushes of a step. `rows` and `row_values`: whole, one of each sparse gradient."""
    dense, sparse, _ = _specs(spec)
    on_cpu, first = _cpu(values), 0
    pushes = []
    for variable, blocks, at, count in dense:
        pushes.append(SendCall(variable, blocks, at, on_cpu[first : first + count]))
        first += count
    for (variable, blocks, at, heights), ids, of_ids in zip(sparse, _cpu(rows), _cpu(row_values), strict=True):
        pushes.append(SendCall(variable, blocks, at, [of_ids], heights, ids))
    return pushes


def _push_for_all(values: list[Tensor], rows: list[Tensor], row_values: list[Tensor], remote: str, spec: str) -> Tensor:
    remotes.get_threaded(remote).push_for_all(_pushes(spec, values, rows, row_values))
    return _token()


def _check_threads(token: Tensor, remote: str, num_came: int, waited_s: float) -> Tensor:
    if num_came < 0 or remote in remotes.opened():  # one that is being closed pushes what waits first
        remotes.get_threaded(remote).check_threads(num_came, waited_s)
    return _token()


def _send_ahead(values: list[Tensor], remote: str, blocks: list[str], at: list[int]) -> Tensor:
    return torch.zeros(1, dtype=torch.int64)  # nothing was sent: the step's message brings all


def _recv(
    out: list[Tensor], after: list[Tensor], remote: str, variable: str, blocks: list[str], at: list[int]
) -> Tensor:
    on_cpu = _writable(out)
    remotes.get(remote).recv(variable, blocks, at, on_cpu)
    return _written(out, on_cpu)


def _recv_step(
    out: list[Tensor], after: list[Tensor], remote: str, variables: list[str], blocks: list[str], at: list[int]
) -> Tensor:
    on_cpu = _writable(out)
    remotes.get_step(remote).recv_step(variables, blocks, at, on_cpu)
    return _written(out, on_cpu)


def _writable(out: list[Tensor]) -> list[Tensor]:
    """Return contiguous tensors on the CPU: those of `out` that are, and others to copy from."""
    return [t if t.device.type == "cpu" and t.is_contiguous() else torch.empty(t.shape, dtype=t.dtype) for t in out]


def _written(out: list[Tensor], on_cpu: list[Tensor]) -> Tensor:
    for mine, pulled in zip(out, on_cpu, strict=True):
        if mine is not pulled:
            mine.copy_(pulled)
    return _token()


def _fetch_barrier(after: list[Tensor], remote: str) -> Tensor:
    remotes.get(remote).fetch_barrier()
    return _token()


def _prefetch(
    ids: Tensor,
    remote: str,
    table: str,
    blocks: list[str],
    at: list[int],
    heights: list[int],
    width: int,
    dtype: torch.dtype,
    padding_idx: int | None,
) -> Tensor:
    flat = ids.detach().cpu().reshape(-1).contiguous()
    live = None if padding_idx is None else flat != padding_idx
    if live is None or bool(live.all()):
        out = torch.empty(flat.numel(), width, dtype=dtype)
        remotes.get(remote).prefetch(table, blocks, at, heights, flat, out)
    else:
        out = torch.zeros(flat.numel(), width, dtype=dtype)
        some = torch.empty(int(live.sum()), width, dtype=dtype)
        remotes.get(remote).prefetch(table, blocks, at, heights, flat[live], some)
        out[live] = some
    return out.reshape(*ids.shape, width).to(ids.device)


def _geo(
    parameter: Tensor, rows: Tensor | None, remote: str, variable: str, blocks: list[str], at: list[int],
    heights: list[int],
) -> Tensor:  # fmt: skip
    remotes.get(remote).geo(variable, blocks, at, heights, parameter, rows)
    return _token()


def _geo_step(
    parameters: list[Tensor], rows: list[Tensor], remote: str, variables: list[str], num_rows: list[int], spec: str
) -> Tensor:
    own, calls = iter(rows), []
    for parameter, variable, count, (blocks, at, heights) in zip(
        parameters, variables, num_rows, json.loads(spec), strict=True
    ):
        ids = [next(own) for _ in range(count)] if count else None
        calls.append(GeoCall(variable, blocks, at, heights, parameter, ids))
    remotes.get_step(remote).geo_step(calls)
    return _token()


def _listen_and_serv(
    endpoint: str, endpoints: list[str], fanin: int, mode: str, blocks: list[str], parameters: list[str],
    first_rows: list[int], round_block: int,
) -> Tensor:  # fmt: skip
    raise RuntimeError("listen_and_serv serves a whole program: run that with fluid.Executor, not in a graph")


def _sparse_table(ids: Tensor, values: Tensor, *settings: Any, **named: Any) -> Any:
    raise RuntimeError("a sparse table lives on a parameter server: run the server's program with fluid.Executor")


_KERNELS: dict[str, tuple[str, Any]] = {
    "send": ("(Tensor[] values, str remote, str variable, str[] blocks, int[] at) -> Tensor", _send),
    "send_rows": (
        "(Tensor rows, Tensor values, str remote, str variable, str[] blocks, int[] at, int[] heights) -> Tensor",
        _send_rows,
    ),
    "send_barrier": ("(Tensor[] after, str remote) -> Tensor", _send_barrier),
    "recv": ("(Tensor(a!)[] out, Tensor[] after, str remote, str variable, str[] blocks, int[] at) -> Tensor", _recv),
    "send_step": (
        "(Tensor[] values, Tensor[] rows, Tensor[] row_values, Tensor[] after, str remote, str spec) -> Tensor",
        _send_step,
    ),
    # Of threads that train in step: the mean of their gradients, which one of them pushes; and a check of those that
    # have not come, of which `num_came` have (-1: the exchange has ended, and this raises why).
    "push_for_all_by_python": (
        "(Tensor[] values, Tensor[] rows, Tensor[] row_values, str remote, str spec) -> Tensor",
        _push_for_all,
    ),
    "check_threads_by_python": ("(Tensor token, str remote, int num_came, float waited_s) -> Tensor", _check_threads),
    # Gradients of blocks, which leave while the rest is computed. Its token goes to the step's `send_step`, which has
    # the same tensors: an element other than zero is the number of what was sent.
    "send_ahead": ("(Tensor[] values, str remote, str[] blocks, int[] at) -> Tensor", _send_ahead),
    "recv_step": (
        "(Tensor(a!)[] out, Tensor[] after, str remote, str[] variables, str[] blocks, int[] at) -> Tensor",
        _recv_step,
    ),
    "fetch_barrier": ("(Tensor[] after, str remote) -> Tensor", _fetch_barrier),
    "prefetch": (
        "(Tensor ids, str remote, str table, str[] blocks, int[] at, int[] heights, int width, ScalarType dtype, "
        "int? padding_idx) -> Tensor",
        _prefetch,
    ),
    "geo": (
        "(Tensor(a!) parameter, Tensor? rows, str remote, str variable, str[] blocks, int[] at, int[] heights) "
        "-> Tensor",
        _geo,
    ),
    "geo_step": (
        "(Tensor(a!)[] parameters, Tensor[] rows, str remote, str[] variables, int[] num_rows, str spec) -> Tensor",
        _geo_step,
    ),
    "listen_and_serv": (
        "(str endpoint, str[] endpoints, int fanin, str mode, str[] blocks, str[] parameters, int[] first_rows, "
        "int round_block) -> Tensor",
        _listen_and_serv,
    ),
    # Takes a push; gives the rows of the table and its states that it names, each once, and the merged gradients with
    # their positions among these rows. What is written into the rows goes back into the table.
    "sparse_table": (
        "(Tensor ids, Tensor values, *, int width, int capacity, str first, float a, float b, int seed, "
        "int? padding_idx, float[] first_states, int admit_after, float? expire_after_s) "
        "-> (Tensor[] rows, Tensor positions, Tensor merged)",
        _sparse_table,
    ),
}
_KERNELS |= {f"{name}_by_python": _KERNELS[name] for name in ("send_step", "recv_step", "prefetch", "geo", "geo_step")}
_library: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch has not typed it
for _name, (_schema, _kernel) in _KERNELS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
REMOTE_NAMES = frozenset(_KERNELS)
