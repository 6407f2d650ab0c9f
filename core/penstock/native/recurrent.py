"""Recurrent layers as whole operators, one layer in one direction, time first.

`penstock.lstm`, `penstock.gru`: what torch.nn.LSTM and torch.nn.GRU compute, with torch's layout of weights.
`penstock.lstm_sequence`: over gates [t, b, 4 h] that are projected already, with peepholes if given; returns all cells.
Gates, and those of its weight [h, 4 h], are in Fluid's order: candidate, i, f, o (lstm_op.cc, Fluid 1.8).

An operator returns what its backward operator needs (`saved`), so that neither runs twice.  A float32 `lstm` on a CPU
with oneDNN is oneDNN's own layer; everything else is a loop here, whose products over all steps (input, weight
gradients) are one product each.
Invariant: no operator writes an operand but `saved` in `lstm_backward`; results are contiguous and share no memory with
operands or each other.

`saved` of oneDNN's layer is its workspace, whose size only oneDNN knows: a tensor of no elements over a storage that
holds the bytes, so that its shape is what the program says.  It may be passed on, but not copied.  oneDNN's backward
pass uses a part of it as scratch: a second one gives the same bits after the first, and wrong ones beside it.  Hence
the declared write, which orders them; a private copy would cost a tenth to two thirds of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.compat.torch import check_value
from penstock.native.activations import ACTIVATIONS, Cell, cell_of

aten = torch.ops.aten
_LSTM_MODE = 2  # torch's number of the cell, in aten::mkldnn_rnn_layer

_LIBRARY: Any = torch.library.Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch
_WEIGHTS = "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, bool reverse"
_RECURRENT = "Tensor h0, Tensor c0, Tensor weight, Tensor? peephole, bool reverse"
_LIBRARY.define(
    f"lstm(Tensor x, Tensor h0, Tensor c0, {_WEIGHTS}, bool keep) -> (Tensor out, Tensor h, Tensor c, Tensor saved)"
)
_LIBRARY.define(
    f"lstm_backward(Tensor? grad_out, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor h0, Tensor c0, {_WEIGHTS}, "
    "Tensor out, Tensor c, Tensor(a!) saved, bool input_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_ACTIVATIONS = 'str gate="sigmoid", str state="tanh", str candidate="tanh"'
_LIBRARY.define(
    f"lstm_sequence(Tensor gates, {_RECURRENT}, bool keep, {_ACTIVATIONS}) -> (Tensor out, Tensor cells, Tensor saved)"
)
_LIBRARY.define(
    f"lstm_sequence_backward(Tensor? grad_out, Tensor? grad_cells, {_RECURRENT}, Tensor out, Tensor cells, "
    f"Tensor saved, {_ACTIVATIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_OPTIONAL = _WEIGHTS.replace("Tensor w_ih", "Tensor? w_ih")  # without it, x is projected already
_LIBRARY.define(f"gru(Tensor x, Tensor h0, {_OPTIONAL}, bool keep) -> (Tensor out, Tensor h, Tensor saved)")
_LIBRARY.define(
    f"gru_backward(Tensor? grad_out, Tensor? grad_h, Tensor x, Tensor h0, {_OPTIONAL}, "
    "Tensor out, Tensor saved, bool input_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Weights(NamedTuple):
    """Of one layer and direction: `w_ih` [g h, i], `w_hh` [g h, h] for g gates, biases [g h]; `reverse`: last first.

    Without `w_ih` the input is projected already.
    """

    w_ih: Tensor | None
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    reverse: bool


# ---------------------------------------------------------------- LSTM


def _is_fused(x: Tensor) -> bool:
    """Whether oneDNN's layer is used, as torch does for float32."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch
    return x.device.type == "cpu" and x.dtype == torch.float32 and bool(available)


def _order(num_steps: int, reverse: bool) -> range:
    return range(num_steps - 1, -1, -1) if reverse else range(num_steps)


def _projected(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [t, b, i] times weight [n, i]: [t, b, n] in one product; x itself without a weight."""
    if weight is None:
        return x
    flat = x.reshape(-1, x.shape[-1])
    product = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
    return product.view(x.shape[0], x.shape[1], weight.shape[0])


def _lstm(x: Tensor, h0: Tensor, c0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights, keep = Weights(*rest[:5]), bool(rest[5])
    return _lstm_fused(x, h0, c0, weights, keep) if _is_fused(x) else _lstm_steps(x, h0, c0, weights, keep)


def _fused_operands(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    none = x.new_zeros(weights.w_hh.shape[0]) if weights.b_ih is None or weights.b_hh is None else None
    biases = (none, none) if none is not None else (weights.b_ih, weights.b_hh)
    return x.contiguous(), cast(Tensor, weights.w_ih), weights.w_hh, cast(Tensor, biases[0]), cast(Tensor, biases[1])


def _lstm_fused(
    x: Tensor, h0: Tensor, c0: Tensor, weights: Weights, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = weights.w_hh.shape[1]
    # oneDNN hands its workspace out only where gradients are on; nothing here is on a tape.
    with torch.set_grad_enabled(keep):
        out, h, c, workspace = aten.mkldnn_rnn_layer(
            *(t.detach() for t in _fused_operands(x, weights)), h0.contiguous(), c0.contiguous(), weights.reverse, [],
            _LSTM_MODE, size, 1, True, False, False, keep,
        )  # fmt: skip
    saved = torch.empty(0, dtype=torch.uint8)
    if keep:
        saved.set_(workspace.untyped_storage(), 0, torch.Size([0]), (1,))
    return out, h.view(h0.shape), c.view(c0.shape), saved


def _lstm_steps(
    x: Tensor, h0: Tensor, c0: Tensor, weights: Weights, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, batch, size = x.shape[0], x.shape[1], weights.w_hh.shape[1]
    bias = None if weights.b_ih is None or weights.b_hh is None else weights.b_ih + weights.b_hh
    saved = x.new_empty(steps, batch, 5 * size)  # i f g o, and the cell
    gates, cells = saved[..., : 4 * size], saved[..., 4 * size :]
    gates.copy_(_projected(x, weights.w_ih, bias))
    out = x.new_empty(steps, batch, size)
    order = _order(steps, weights.reverse)
    _run_steps(gates, cells, out, (h0, c0), Cell(weights.w_hh), order)
    return out, out[order[-1]].clone(), cells[order[-1]].clone(), saved if keep else x.new_empty(0)


def _run_steps(
    gates: Tensor, cells: Tensor, out: Tensor, states: tuple[Tensor, Tensor], cell: Cell, order: range
) -> None:
    """Turn projected `gates` into gates, step by step; fill `cells` and `out`."""
    recurrent, peephole, (h, c) = cell.w_hh.t(), cell.peephole, states
    for t in order:
        now = gates[t].addmm_(h, recurrent)
        i, f, g, o = cell.split(now)
        if peephole is not None:
            i.addcmul_(c, peephole[0])
            f.addcmul_(c, peephole[1])
        cell.gate.over(cell.input_and_forget(now))
        c = torch.mul(f, c, out=cells[t]).addcmul_(i, cell.candidate.over(g))
        if peephole is not None:
            o.addcmul_(c, peephole[2])
        h = cell.state.into(c, out[t]).mul_(cell.gate.over(o))


def _lstm_backward(*given: Any) -> tuple[Tensor, ...]:
    grads, (x, h0, c0), weights = given[:3], given[3:6], Weights(*given[6:11])
    out, c, saved, input_grad = given[11:]
    if saved.dtype == torch.uint8:
        return _lstm_backward_fused(grads, (x, h0, c0), weights, out, c, saved)
    return _lstm_backward_steps(grads, (x, h0, c0), weights, out, saved, input_grad)


def _lstm_backward_fused(
    grads: tuple[Tensor | None, ...],
    inputs: tuple[Tensor, ...],
    weights: Weights,
    out: Tensor,
    c: Tensor,
    saved: Tensor,
) -> tuple[Tensor, ...]:
    size, (x, h0, c0) = weights.w_hh.shape[1], inputs
    workspace = torch.empty(0, dtype=torch.uint8).set_(saved.untyped_storage())
    grad_out = torch.zeros_like(out) if grads[0] is None else grads[0].contiguous()
    last = out[0 if weights.reverse else -1].contiguous()
    grad_h, grad_c = (None if g is None else g.contiguous() for g in grads[1:])
    with torch.enable_grad():
        found = aten.mkldnn_rnn_layer_backward(
            *_fused_operands(x, weights), h0.contiguous(), c0.contiguous(), out, last, c, grad_out, grad_h, grad_c,
            weights.reverse, _LSTM_MODE, size, 1, True, True, False, [], False, workspace,
        )  # fmt: skip
    gx, gw_ih, gw_hh, gb, _, gh, gc = found
    return gx, gh.reshape(h0.shape), gc.reshape(c0.shape), gw_ih, gw_hh, gb


def _lstm_backward_steps(
    grads: tuple[Tensor | None, ...],
    inputs: tuple[Tensor, ...],
    weights: Weights,
    out: Tensor,
    saved: Tensor,
    input_grad: bool,
) -> tuple[Tensor, ...]:
    (x, h0, c0), (grad_out, grad_h, grad_c), size = inputs, grads, weights.w_hh.shape[1]
    gates, cells = saved[..., : 4 * size], saved[..., 4 * size :]
    walk = _Walk(_order(x.shape[0], weights.reverse), gates, cells, c0, Cell(weights.w_hh))
    made, dh, dc = walk.backward((grad_out, None), (grad_h, grad_c))
    gx, gw_ih, gb = _input_gradients(made, x, weights.w_ih, input_grad)
    return gx, dh, dc, gw_ih, _recurrent_gradient(made, h0, out, weights.reverse), gb


class _Walk(NamedTuple):
    """An LSTM's forward pass, to be walked back."""

    order: range
    gates: Tensor
    cells: Tensor
    c0: Tensor
    cell: Cell

    def backward(
        self, sequences: tuple[Tensor | None, Tensor | None], last: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the projected gates, h0 and c0, from those of (out, cells) and the last (h, c)."""
        made = torch.empty_like(self.gates, memory_format=torch.contiguous_format)
        dh, dc = (torch.zeros_like(self.c0) if g is None else g for g in last)
        for position in range(len(self.order) - 1, -1, -1):
            t = self.order[position]
            before = self.cells[self.order[position - 1]] if position else self.c0
            dh, dc = (d if g is None else d + g[t] for d, g in zip((dh, dc), sequences, strict=True))
            dc = self._step(t, before, dh, dc, self.cell.split(made[t]))
            dh = made[t] @ self.cell.w_hh
        return made, dh.contiguous(), dc.contiguous()

    def _step(self, t: int, before: Tensor, dh: Tensor, dc: Tensor, made: tuple[Tensor, ...]) -> Tensor:
        (i, f, g, o), (di, df, dg, do), cell = self.cell.split(self.gates[t]), made, self.cell
        squashed = cell.state.into(self.cells[t], torch.empty_like(dc))
        dc = dc + cell.state.back(dh * o, squashed)
        do.copy_(cell.gate.back(dh * squashed, o))
        if cell.peephole is not None:
            dc.addcmul_(do, cell.peephole[2])
        di.copy_(cell.gate.back(dc * g, i))
        df.copy_(cell.gate.back(dc * before, f))
        dg.copy_(cell.candidate.back(dc * i, g))
        dc = dc * f
        return dc if cell.peephole is None else dc.addcmul_(di, cell.peephole[0]).addcmul_(df, cell.peephole[1])


def _input_gradients(made: Tensor, x: Tensor, w_ih: Tensor | None, input_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    if w_ih is None:
        return made, made.new_empty(0), made.new_empty(0)
    flat = made.view(-1, made.shape[-1])
    # A gradient that was not requested is not read.
    gx = torch.mm(flat, w_ih).view(x.shape) if input_grad else torch.empty_like(x)
    return gx, torch.mm(flat.t(), x.reshape(-1, x.shape[-1])), flat.sum(0)


def _read(h0: Tensor, out: Tensor, reverse: bool) -> Tensor:
    """The states [t b, h] that the steps read."""
    read = torch.cat([out[1:], h0[None]]) if reverse else torch.cat([h0[None], out[:-1]])
    return read.view(-1, h0.shape[-1])


def _recurrent_gradient(made: Tensor, h0: Tensor, out: Tensor, reverse: bool) -> Tensor:
    return torch.mm(made.view(-1, made.shape[-1]).t(), _read(h0, out, reverse))


# ---------------------------------------------------------------- LSTM over gates


def _lstm_sequence(gates: Tensor, h0: Tensor, c0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (weight, peephole, reverse, keep), activations = rest[:4], rest[4:]
    saved = gates.clone(memory_format=torch.contiguous_format)
    out, cells = (gates.new_empty(*gates.shape[:2], weight.shape[0]) for _ in range(2))
    cell = cell_of(weight, peephole, activations)
    _run_steps(saved, cells, out, (h0, c0), cell, _order(gates.shape[0], reverse))
    return out, cells, saved if keep else gates.new_empty(0)


def _lstm_sequence_backward(*given: Any) -> tuple[Tensor, ...]:
    grads, (h0, c0, weight, peephole, reverse), (out, cells, saved) = given[:2], given[2:7], given[7:10]
    cell = cell_of(weight, peephole, given[10:])
    walk = _Walk(_order(saved.shape[0], reverse), saved, cells, c0, cell)
    made, dh, dc = walk.backward(grads, (None, None))
    seen = weight.new_zeros(3, weight.shape[0])
    if peephole is not None:
        before = torch.cat([cells[1:], c0[None]]) if reverse else torch.cat([c0[None], cells[:-1]])
        di, df, _, do = cell.split(made)
        for row, (gradient, own) in enumerate(((di, before), (df, before), (do, cells))):
            torch.sum(gradient * own, (0, 1), out=seen[row])
    flat = made.view(-1, made.shape[-1])
    return made, dh, dc, torch.mm(_read(h0, out, reverse).t(), flat), seen


# ---------------------------------------------------------------- GRU


def _gru(x: Tensor, h0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights, keep = Weights(*rest[:5]), bool(rest[5])
    steps, batch, size = x.shape[0], x.shape[1], weights.w_hh.shape[1]
    saved = x.new_empty(steps, batch, 4 * size)  # r z n, and what h gives to n
    saved[..., : 3 * size].copy_(_projected(x, weights.w_ih, weights.b_ih))
    out, recurrent, h = x.new_empty(steps, batch, size), weights.w_hh.t(), h0
    for t in _order(steps, weights.reverse):
        own = torch.mm(h, recurrent) if weights.b_hh is None else torch.addmm(weights.b_hh, h, recurrent)
        now = saved[t]
        now[:, : 2 * size].add_(own[:, : 2 * size]).sigmoid_()
        r, z, n, given = now.chunk(4, 1)
        given.copy_(own[:, 2 * size :])
        n.addcmul_(r, given).tanh_()
        h = torch.lerp(n, h, z, out=out[t])
    return out, h.clone(), saved if keep else x.new_empty(0)


def _gru_backward(*given: Any) -> tuple[Tensor, ...]:
    (grad_out, grad_h), (x, h0), weights = given[:2], given[2:4], Weights(*given[4:9])
    out, saved, input_grad = given[9:]
    size, order = weights.w_hh.shape[1], _order(x.shape[0], weights.reverse)
    of_input, of_h = (saved.new_empty(*saved.shape[:2], 3 * size) for _ in range(2))
    dh = torch.zeros_like(h0) if grad_h is None else grad_h
    for position in range(len(order) - 1, -1, -1):
        t = order[position]
        before = out[order[position - 1]] if position else h0
        r, z, n, own = saved[t].chunk(4, 1)
        dr, dz, dn = of_input[t].chunk(3, 1)
        dh = dh if grad_out is None else dh + grad_out[t]
        kept = dh * z
        dn.copy_(aten.tanh_backward(dh - kept, n))
        dz.copy_(aten.sigmoid_backward(dh * (before - n), z))
        dr.copy_(aten.sigmoid_backward(dn * own, r))
        whole = of_h[t].copy_(of_input[t])
        whole[:, 2 * size :].mul_(r)
        dh = kept.addmm_(whole, weights.w_hh)
    gx, gw_ih, gb_ih = _input_gradients(of_input, x, weights.w_ih, input_grad)
    gw_hh = _recurrent_gradient(of_h, h0, out, weights.reverse)
    return gx, dh.contiguous(), gw_ih, gw_hh, gb_ih, of_h.view(-1, 3 * size).sum(0)


# ---------------------------------------------------------------- shapes


def _expect(holds: Any, operator: str, what: str) -> None:
    check_value(holds, lambda: f"penstock.{operator}: {what}")


def _check_shapes(operator: str, gates: int, x: Tensor, states: tuple[Tensor, ...], weights: Weights) -> None:
    _expect(x.dim() == 3, operator, f"x has shape {list(x.shape)}; expected [time, batch, size]")
    size = weights.w_hh.shape[1]
    wanted = {"w_ih": [gates * size, x.shape[2]], "w_hh": [gates * size, size]}
    for name, shape in wanted.items():
        found = getattr(weights, name)
        if found is None:
            _expect(x.shape[2] == shape[0], operator, f"x has shape {list(x.shape)}; expected [.., .., {shape[0]}]")
            continue
        _expect(
            list(found.shape) == shape,
            operator,
            f"{name} has shape {list(found.shape)}; expected {shape}, gates by size",
        )
    for state in states:
        _expect(
            state.dim() == 2 and state.shape[1] == size, operator,
            f"a state has shape {list(state.shape)}; expected [{x.shape[1]}, {size}]",
        )  # fmt: skip


def _lstm_shape(x: Tensor, h0: Tensor, c0: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, keep = Weights(*rest[:5]), bool(rest[5])
    _check_shapes("lstm", 4, x, (h0, c0), weights)
    size = weights.w_hh.shape[1]
    saved = x.new_empty([x.shape[0], x.shape[1], 5 * size] if keep else [0])
    if _is_fused(x):
        saved = x.new_empty([0], dtype=torch.uint8)
    return x.new_empty([x.shape[0], x.shape[1], size]), h0.new_empty(h0.shape), c0.new_empty(c0.shape), saved


def _gru_shape(x: Tensor, h0: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weights, keep = Weights(*rest[:5]), bool(rest[5])
    _check_shapes("gru", 3, x, (h0,), weights)
    size = weights.w_hh.shape[1]
    saved = x.new_empty([x.shape[0], x.shape[1], 4 * size] if keep else [0])
    return x.new_empty([x.shape[0], x.shape[1], size]), h0.new_empty(h0.shape), saved


def _lstm_sequence_shape(gates: Tensor, h0: Tensor, c0: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    (weight, peephole, _, keep), activations = rest[:4], rest[4:]
    size = weight.shape[0]
    _expect(
        all(name in ACTIVATIONS for name in activations), "lstm_sequence",
        f"the activations are {activations}; expected some of {', '.join(ACTIVATIONS)}",
    )  # fmt: skip
    _expect(
        gates.dim() == 3 and gates.shape[2] == 4 * size and weight.shape[1] == 4 * size, "lstm_sequence",
        f"gates have shape {list(gates.shape)}, weight {list(weight.shape)}; expected [time, batch, 4 h] and [h, 4 h]",
    )  # fmt: skip
    if peephole is not None:
        shape = list(peephole.shape)
        _expect(shape == [3, size], "lstm_sequence", f"peephole has shape {shape}; expected [3, {size}]")
    made = [*gates.shape[:2], size]
    return gates.new_empty(made), gates.new_empty(made), gates.new_empty(gates.shape if keep else [0])


def _lstm_sequence_backward_shape(*given: Any) -> tuple[Tensor, ...]:
    h0, c0, weight, saved = given[2], given[3], given[4], given[9]
    return (*_like(saved, h0, c0, weight), weight.new_empty([3, weight.shape[0]]))


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in tensors)


def _lstm_backward_shape(*given: Any) -> tuple[Tensor, ...]:
    x, h0, c0, w_ih, w_hh = given[3:8]
    return (*_like(x, h0, c0, w_ih, w_hh), w_hh.new_empty([w_hh.shape[0]]))


def _gru_backward_shape(*given: Any) -> tuple[Tensor, ...]:
    x, h0, w_ih, w_hh = given[2:6]
    of_input = (x.new_empty([0]), x.new_empty([0]))
    if w_ih is not None:
        of_input = (w_ih.new_empty(w_ih.shape), w_hh.new_empty([w_hh.shape[0]]))
    return (*_like(x, h0), of_input[0], *_like(w_hh), of_input[1], w_hh.new_empty([w_hh.shape[0]]))


# ---------------------------------------------------------------- derivatives


def _lstm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, c, saved = output
    *tensors, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, out, c, saved)
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)


def _lstm_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, h0, c0, w_ih, w_hh, b_ih, b_hh, out, c, saved = ctx.saved_tensors
    if all(g is None for g in grads[:3]):
        return (None,) * 9
    gx, gh, gc, gw_ih, gw_hh, gb = torch.ops.penstock.lstm_backward(
        *grads[:3], x, h0, c0, w_ih, w_hh, b_ih, b_hh, ctx.reverse, out, c, saved, ctx.needs_input_grad[0]
    )
    bias = None if b_ih is None else gb
    return _asked(ctx, gx), gh, gc, gw_ih, gw_hh, bias, bias, None, None


def _sequence_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.reverse, ctx.activations = inputs[5], inputs[7:]
    ctx.save_for_backward(*inputs[1:5], *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _sequence_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    h0, c0, weight, peephole, *outputs = ctx.saved_tensors
    if all(g is None for g in grads[:2]):
        return (None,) * 10
    call = torch.ops.penstock.lstm_sequence_backward
    *found, seen = call(*grads[:2], h0, c0, weight, peephole, ctx.reverse, *outputs, *ctx.activations)
    return *found, None if peephole is None else seen, None, None, None, None, None


def _gru_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, _, saved = output
    *tensors, ctx.reverse, _ = inputs
    ctx.save_for_backward(*tensors, out, saved)
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)


def _gru_derivative(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    x, h0, w_ih, w_hh, b_ih, b_hh, out, saved = ctx.saved_tensors
    if all(g is None for g in grads[:2]):
        return (None,) * 8
    gx, gh, gw_ih, gw_hh, gb_ih, gb_hh = torch.ops.penstock.gru_backward(
        *grads[:2], x, h0, w_ih, w_hh, b_ih, b_hh, ctx.reverse, out, saved, ctx.needs_input_grad[0]
    )
    given = (gw_ih, gw_hh, gb_ih, gb_hh)
    weights = (None if w is None else g for w, g in zip((w_ih, w_hh, b_ih, b_hh), given, strict=True))
    return _asked(ctx, gx), gh, *weights, None, None


def _asked(ctx: Any, gradient: Tensor) -> Tensor | None:
    return gradient if ctx.needs_input_grad[0] else None


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lstm": (_lstm, _lstm_shape),
    "lstm_backward": (_lstm_backward, _lstm_backward_shape),
    "lstm_sequence": (_lstm_sequence, _lstm_sequence_shape),
    "lstm_sequence_backward": (_lstm_sequence_backward, _lstm_sequence_backward_shape),
    "gru": (_gru, _gru_shape),
    "gru_backward": (_gru_backward, _gru_backward_shape),
}
for _name, (_kernel, _shape) in _KERNELS.items():
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"penstock::{_name}", _shape, lib=_LIBRARY)
_DERIVATIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lstm": (_lstm_derivative, _lstm_context),
    "lstm_sequence": (_sequence_derivative, _sequence_context),
    "gru": (_gru_derivative, _gru_context),
}
for _name, (_derivative, _context) in _DERIVATIVES.items():
    torch.library.register_autograd(f"penstock::{_name}", _derivative, setup_context=_context, lib=_LIBRARY)
