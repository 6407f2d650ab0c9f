"""What orders operators: blocks in text, as those of control flow get them, and delays; and what torch gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.native import delays as _delays  # noqa: F401 - registers its operator
from penstock.program.control.arrays import packed, unpacked

OPS: Any = torch.ops.penstock


def unary(call: str) -> str:
    """A block of a bool and of rows x: a function of torch on the rows."""
    return f"""block 1 inputs=[p, x] symbols=[s] outputs=[y]
  var p : bool[1]
  var x : float32[s, 3]
  var y : float32[s, 3]
  op {call}_0 aten.{call}.default(%x) -> %y role=FORWARD
end
"""


HALVING = """block 1 inputs=[p, x] symbols=[s] outputs=[q, y]
  var p : bool[]
  var x : float32[s, 3]
  var y : float32[s, 3]
  var z : float32[]
  var q : bool[]
  op mul_0 aten.mul.Scalar(%x, 0.5) -> %y role=FORWARD
  op sum_0 aten.sum.default(%y) -> %z role=FORWARD
  op gt_0 aten.gt.Scalar(%z, 1.0) -> %q role=FORWARD
end
"""


def branch(*, taken: bool, rows: int = 2) -> list[Any]:
    """Operands of a choice between sin and cos."""
    return ["conditional_block", [torch.tensor([taken]), torch.rand(rows, 3)], [rows], [unary("sin"), unary("cos")], []]


def control() -> Sequence[tuple[Tensor, Tensor]]:
    x = torch.ones(2, 3)
    found: list[tuple[Tensor, Tensor]] = []
    for taken, function in ((True, torch.sin), (False, torch.cos)):
        kind, (pred, rows), *rest = branch(taken=taken)
        found.append((OPS.control(kind, [pred, rows], *rest)[0], function(rows)))
    halved = OPS.control("while", [torch.tensor(True), x], [2], [HALVING], [2])[1]
    return [*found, (halved, x / 8)]


def control_backward() -> Sequence[tuple[Tensor, Tensor]]:
    kind, (pred, rows), *rest = branch(taken=True)
    grad = torch.rand(2, 3)
    (found,) = OPS.control_backward([grad], kind, [pred, rows], *rest, [1])
    (through,) = OPS.control_backward(
        [None, grad], "while", [torch.tensor(True), torch.ones(2, 3)], [2], [HALVING], [2], [1]
    )
    return [(found, grad * rows.cos()), (through, grad / 8)]


def delayed() -> Sequence[tuple[Tensor, Tensor]]:
    x = torch.rand(3, 2)
    return [(OPS.delayed(x, torch.zeros(5)), x)]


def add_arrays() -> Sequence[tuple[Tensor, Tensor]]:
    """Elements that both have are added; others stay."""
    x, y, z = torch.rand(2, 3), torch.rand(2, 3), torch.rand(4)
    made = unpacked(OPS.add_arrays(packed([x, None, z], x.dtype), packed([y, y], x.dtype)))
    assert all(one is not None for one in made)
    return list(zip((one for one in made if one is not None), (x + y, y, z), strict=True))


ORACLES = (add_arrays, control, control_backward, delayed)
