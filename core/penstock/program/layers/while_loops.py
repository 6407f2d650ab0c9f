"""`while_loop`: a While whose block is a function of the variables that it carries.

A variable of which the body returns another shape is carried in an array of one element: the sizes that change follow
from data then, in the block and in what the loop returns. They are known once the body was recorded, so it is called
again for them. Source: while_loop (python/paddle/fluid/layers/control_flow.py, Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.compat.torch import tree_flatten, tree_unflatten
from penstock.errors import ArgumentError, ProgramError
from penstock.program.layers.arrays import array_read, array_write
from penstock.program.layers.control_flow import While, expect_condition, expect_name
from penstock.program.layers.tensor import assign, fill_constant
from penstock.program.record.context import default_main_program
from penstock.program.record.declared_sizes import fix_all
from penstock.program.record.opening import recording_of
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.source import user_line
from penstock.program.record.unsized import Unsized
from penstock.program.record.variable import Variable

Positions = Mapping[int, frozenset[int]]


class _Changes(Exception):
    """The body returns other sizes than `open_sizes` has: positions of sizes, by the number of a variable."""

    def __init__(self, open_sizes: Positions) -> None:
        super().__init__()
        self.open_sizes = open_sizes


def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Sequence[Any], is_test: bool = False,
    name: str | None = None,
) -> list[Any]:  # fmt: skip
    """Return `loop_vars` after `vars = body(*vars)` was run as long as `cond(*vars)` is true.

    `loop_vars` themselves have the last values from then on, too; an input that gradients were asked for, a
    parameter, a view and one whose sizes the body changes keep their own. `body` and `cond` are called once more for
    each time that sizes were found to change. Dtypes and numbers of dimensions stay those of `loop_vars`.
    Raises ProgramError for others, and for another number of variables.
    """
    _expect_loop(cond, body, loop_vars)
    expect_name("while_loop", name)
    if not loop_vars:
        raise ProgramError(f"{user_line()}: while_loop needs variables to carry, got {loop_vars!r}")
    main, open_sizes = default_main_program(), dict[int, frozenset[int]]()
    leaves, nest = tree_flatten(list(loop_vars))
    fix_all(recording_of(main))  # once, so that a body that is called again has the same sizes
    while True:
        try:
            with undone_on_failure(recording_of(main), renames=True):
                return _recorded(cond, body, (leaves, nest), open_sizes, name or main.unique("while_loop"), is_test)
        except _Changes as found:
            open_sizes |= found.open_sizes


def _recorded(
    cond: Callable[..., Any], body: Callable[..., Any], given: tuple[list[Any], Any], open_sizes: Positions, name: str,
    is_test: bool,
) -> list[Any]:  # fmt: skip
    leaves, nest = given
    state = [_State(leaf, open_sizes.get(at, frozenset())) for at, leaf in enumerate(leaves)]
    going = cond(*tree_unflatten([s.first for s in state], nest))
    expect_condition("while_loop", going)
    going = assign(going)
    with While(going, is_test, name).block():
        made = body(*tree_unflatten([s.read() for s in state], nest))
        new, shape = tree_flatten(list(made) if isinstance(made, (list, tuple)) else [made])
        if str(shape) != str(nest):
            raise ProgramError(f"{user_line()}: the body of while_loop returns {shape}, its variables are {nest}")
        _carry(state, new, open_sizes)
        assign(cond(*tree_unflatten([s.read() for s in state], nest)), going)
    _write_back(leaves, state)
    return list(tree_unflatten([s.read() for s in state], nest))


class _State:
    """A variable of the loop: a copy of it, or an array of one element where `open_sizes` are positions of its sizes.

    `first`: what the condition reads before the loop.
    """

    def __init__(self, leaf: Any, open_sizes: frozenset[int]) -> None:
        self.open_sizes, self.first = open_sizes, leaf
        if open_sizes:
            self._at = fill_constant([1], "int64", 0)
            self._array = array_write(leaf, self._at)
            self._array.varies, self._array.varying = 0 in open_sizes, open_sizes - {0}
        elif leaf.desc.kind != "array":
            self.first = assign(leaf)
        self.shape, self.dtype = leaf.desc.shape, leaf.desc.dtype

    def read(self) -> Any:
        """The variable as it is now."""
        return array_read(self._array, self._at) if self.open_sizes else self.first

    def changes(self, new: Any) -> frozenset[int]:
        """Positions of sizes that change if it becomes `new`, and are not open. Raises ProgramError, ArgumentError."""
        if not isinstance(new, Variable) or (self.first.desc.kind == "array" and new is not self.first):
            raise ArgumentError(f"{user_line()}: the body of while_loop returns {new!r} for {self.first!r}")
        if (len(self.shape), self.dtype) != (len(new.desc.shape), new.desc.dtype):
            raise ProgramError(
                f"{user_line()}: the body of while_loop returns {new!r} for {self.first!r}; expected its dtype and "
                "number of dimensions"
            )
        unequal = (at for at, sizes in enumerate(zip(self.shape, new.desc.shape, strict=True)) if sizes[0] != sizes[1])
        return frozenset(unequal) - self.open_sizes

    def write(self, new: Any) -> None:
        """Let it be `new` from here on."""
        if self.open_sizes:
            array_write(new, self._at, array=self._array)
        else:
            assign(new, self.first)


def _carry(state: Sequence[_State], given: Sequence[Any], open_sizes: Positions) -> None:
    """Write what the body returns into the variables of the loop. Raises _Changes where sizes turn out to change."""
    found = {
        at: changes for at, (old, new) in enumerate(zip(state, given, strict=True)) if (changes := old.changes(new))
    }
    if found:
        raise _Changes({at: changes | open_sizes.get(at, frozenset()) for at, changes in found.items()})
    pairs = [(old, new) for old, new in zip(state, given, strict=True) if new is not old.first]
    copies = [
        assign(new) if any(new is old.first for old in state) else new for _, new in pairs
    ]  # two may change places
    for (old, _), new in zip(pairs, copies, strict=True):
        old.write(new)


def _write_back(leaves: Sequence[Any], state: Sequence[_State]) -> None:
    """Give the variables that a loop began with the values that it ends with.

    Not parameters, which no block may write, nor views, whose memory other variables have too. (In a block a variable
    from outside is a view as well.)
    """
    in_block = bool(recording_of(default_main_program()).open_blocks)
    for leaf, last in zip(leaves, state, strict=True):
        if last.open_sizes or leaf is last.first or isinstance(leaf, Unsized):
            continue
        shared = leaf.desc.storage != leaf.name and not in_block
        fed = leaf.desc.feed and leaf.fake.requires_grad
        if not shared and not fed and not (leaf.desc.parameter and leaf.desc.trainable):
            assign(last.first, leaf)


def _expect_loop(cond: object, body: object, loop_vars: object) -> None:
    if not callable(cond) or not callable(body) or not isinstance(loop_vars, (list, tuple)):
        raise ArgumentError(
            f"{user_line()}: while_loop needs two functions and a list of variables, got {cond!r}, {body!r} and "
            f"{loop_vars!r}"
        )
