"""Control flow: branches and loops over variables, as operators that run blocks.

`cond`, `case`, `switch_case` and `Switch` choose a block by a bool, `While` and `while_loop` (of while_loops.py) repeat
one. What a block reads from outside it reads by name; what it writes there (`assign(x, output)`, `increment`,
`less_than(cond=)`) is written after it, if the block was run. Each is one operator of the Program and one handle of its
graph.
Source: python/paddle/fluid/layers/control_flow.py (Fluid 1.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch

from penstock.compat.torch import tree_flatten, tree_unflatten
from penstock.errors import ArgumentError, ProgramError
from penstock.program.layers.arrays import settle
from penstock.program.record.blocks import Recorded, control, recorded_block, sub_block, symbols_of
from penstock.program.record.context import default_main_program, name_scope
from penstock.program.record.opening import recording_of
from penstock.program.record.recording import Recording
from penstock.program.record.savepoint import undone_on_failure
from penstock.program.record.source import user_line
from penstock.program.record.unsized import Unsized, of_branches, packed_result
from penstock.program.record.variable import Variable
from penstock.program.record.versions import take_over

Branch = Callable[[], Any]


def expect_condition(what: str, value: Any) -> None:
    """Raise ProgramError unless `value` is a bool variable of one element."""
    if not isinstance(value, Variable):
        raise ArgumentError(f"{user_line()}: {what} needs a bool variable as its condition, got {value!r}")
    if value.dtype != torch.bool or any(d != 1 for d in value.desc.shape):
        raise ArgumentError(
            f"{user_line()}: {what} needs a condition of one bool, but {value!r} is none. Compare (layers.less_than), "
            "or reduce it (layers.reduce_any)",
            variable=value.name,
        )


def expect_rows(value: Any) -> None:
    """Raise ProgramError unless `value` is a bool variable [n, 1]."""
    if not isinstance(value, Variable) or value.dtype != torch.bool or value.desc.shape[1:] not in ((1,), ()):
        raise ArgumentError(f"{user_line()}: IfElse needs a bool variable [n, 1], one for each row, got {value!r}")


# ---------------------------------------------------------------- branches


def _branch(recording: Recording, run: Branch | None) -> tuple[Recorded, list[Any], Any]:
    """Record a branch: what it holds, the leaves that it returns, and how they nest."""
    with recorded_block(recording) as block:
        leaves, nest = tree_flatten(run() if run is not None else None)
        for leaf in leaves:
            if leaf is not None and not isinstance(leaf, Variable):
                raise ProgramError(f"{user_line()}: a branch returns {leaf!r}; expected variables, nested or None")
        own = [recording.own(leaf) for leaf in leaves if leaf is not None]
        for array in (v for v in own if _is_array(v) and not (isinstance(v, Unsized) and not v.levels)):
            raise ProgramError(
                f"{user_line()}: a branch returns the array {array.name!r}. Write to an array from outside within the "
                "branches (layers.array_write, layers.assign), and return nothing",
                variable=array.name,
            )
        shapes = [_form(v) for v in own]
        return block.close(v.name for v in own), [[v.name for v in own], shapes], (str(nest), nest, leaves)


def _form(own: Variable) -> tuple[Any, str, int]:
    """Shape (None: of several numbers of dimensions), dtype and levels of sequences of what a branch returns."""
    if isinstance(own, Unsized):
        return None if own.is_open else own.desc.shape, own.desc.dtype, 0
    return own.desc.shape, own.desc.dtype, own.lod_level


def _choose(
    recording: Recording, pred: Variable, then: Recorded, otherwise: Recorded, names: Sequence[Sequence[str]]
) -> list[torch.Tensor]:
    """Record the operator that runs one of two blocks; return what they return."""
    pred = recording.own(pred)
    writes = list(dict.fromkeys((*then.writes, *otherwise.writes)))
    inputs = list(dict.fromkeys((pred.name, *then.reads, *otherwise.reads)))
    symbols = symbols_of(recording, (then, otherwise), inputs)
    blocks = [
        sub_block(recording, one, inputs, [*own, *writes], symbols)
        for one, own in zip((then, otherwise), names, strict=True)
    ]
    if not names[0] and not writes:
        return []
    made = control(recording, "conditional_block", inputs, blocks)
    for name, tensor in zip(writes, made[len(names[0]) :], strict=True):
        take_over(recording, name, tensor)
    return made[: len(names[0])]


def _results(
    recording: Recording, pred: Variable, branches: Sequence[Recorded], names: Sequence[list[str]], shapes: Any
) -> list[Any]:
    """The variables that branches return; those of unequal shapes or dtypes are unsized."""
    (then, otherwise), (left, right) = branches, (list(own) for own in names)
    kinds = [
        [(one.made.get(n) or recording.program.variables[n]).kind for n in own]
        for one, own in zip(branches, names, strict=True)
    ]
    pairs = enumerate(zip(*shapes, *kinds, strict=True))
    unequal = [at for at, (one, other, *kind) in pairs if one != other or kind != ["dense"] * 2]
    for at in unequal:
        if any(own[at][2] for own in shapes):
            raise ProgramError(
                f"{user_line()}: the branches of cond return sequences of different rows. Return what is made of whole "
                "sequences (layers.sequence_pool), or write them to an array from outside (layers.array_write)"
            )
        then, left[at] = packed_result(recording, then, left[at])
        otherwise, right[at] = packed_result(recording, otherwise, right[at])
    made = _choose(recording, pred, then, otherwise, (left, right))
    return [
        of_branches(recording, recording.name_of(one), one, [own[at] for own in shapes])
        if at in unequal
        else recording.handle(one)
        for at, one in enumerate(made)
    ]


def cond(pred: Any, true_fn: Branch | None = None, false_fn: Branch | None = None, name: str | None = None) -> Any:
    """Return what `true_fn()` returns where `pred` is true, else what `false_fn()` returns.

    Both return variables in the same nest, or None. Where their sizes differ, those of the result follow from data;
    where dtypes or numbers of dimensions do, it can only be fetched. Raises ProgramError for another nest.
    """
    expect_condition("cond", pred)
    expect_name("cond", name)
    for fn in (true_fn, false_fn):
        if fn is not None and not callable(fn):
            raise ArgumentError(f"{user_line()}: a branch of cond is {fn!r}; expected a function without arguments")
    main = default_main_program()
    recording = recording_of(main)
    with name_scope(name or main.unique("cond")), undone_on_failure(recording, renames=True):
        then, (left, left_shapes), (left_nest, nest, leaves) = _branch(recording, true_fn)
        otherwise, (right, right_shapes), (right_nest, _, _) = _branch(recording, false_fn)
        if left_nest != right_nest or len(left) != len(right):
            raise ProgramError(
                f"{user_line()}: the branches of cond return {_words(left_nest, left_shapes)} and "
                f"{_words(right_nest, right_shapes)}; expected the same nest"
            )
        shapes = left_shapes, right_shapes
        found = iter(_results(recording, pred, (then, otherwise), (left, right), shapes))
    return tree_unflatten([None if leaf is None else next(found) for leaf in leaves], nest)


def _words(nest: str, shapes: Sequence[tuple[Any, str, int]]) -> str:
    each = ", ".join(f"{dtype}[{', '.join(map(str, shape or '?'))}]" for shape, dtype, _ in shapes)
    return f"({each or 'no variable'} in {nest})"


def case(pred_fn_pairs: Sequence[tuple[Any, Branch]], default: Branch | None = None, name: str | None = None) -> Any:
    """Return what the function of the first true condition returns, else what `default` does; without it the last."""
    pairs: list[Any] = list(pred_fn_pairs) if isinstance(pred_fn_pairs, (list, tuple)) else []
    are_pairs = all(isinstance(pair, (tuple, list)) and len(pair) == 2 and callable(pair[1]) for pair in pairs)
    if not pairs or not are_pairs or not (default is None or callable(default)):
        raise ArgumentError(f"{user_line()}: case needs pairs of a condition and a function, got {pred_fn_pairs!r}")
    if default is None:
        (_, default) = pairs.pop()
    run = default
    for pred, fn in reversed(pairs):
        run = _nested(pred, fn, run, name)
    return run()


def _nested(pred: Any, fn: Branch, otherwise: Branch, name: str | None) -> Branch:
    return lambda: cond(pred, fn, otherwise, name)


def switch_case(
    branch_index: Any,
    branch_fns: Mapping[int, Branch] | Sequence[Any],
    default: Branch | None = None,
    name: str | None = None,
) -> Any:
    """Return what the function of the index returns, else what `default` does; without it that of the largest index.

    `branch_index`: an integer variable of one element. `branch_fns`: functions, or pairs or a dict of an index and a
    function. Raises ProgramError for an index twice.
    """
    _expect_index(branch_index)
    pairs = _indexed(branch_fns)
    if default is not None and not callable(default):
        raise ArgumentError(f"{user_line()}: switch_case: default is {default!r}; expected a function or None")
    if default is None:
        default = pairs[-1][1]
        pairs = pairs[:-1]
    if not pairs:
        return default()
    return case([(branch_index == index, fn) for index, fn in pairs], default, name)


def _expect_index(index: Any) -> None:
    kinds = (torch.int64, torch.int32, torch.uint8)
    if not isinstance(index, Variable) or index.dtype not in kinds or any(d != 1 for d in index.desc.shape):
        raise ArgumentError(
            f"{user_line()}: switch_case needs a variable of one element, int32, int64 or uint8, as branch_index, got "
            f"{index!r}. Cast it (layers.cast)"
        )


def _indexed(branch_fns: Any) -> list[tuple[int, Branch]]:
    listed = isinstance(branch_fns, (Mapping, list, tuple))
    given = list(branch_fns.items() if isinstance(branch_fns, Mapping) else branch_fns) if listed else []
    pairs = [one if isinstance(one, (tuple, list)) else (i, one) for i, one in enumerate(given)]
    if not pairs or not all(len(p) == 2 and isinstance(p[0], Integral) and callable(p[1]) for p in pairs):
        raise ArgumentError(
            f"{user_line()}: switch_case needs functions, or pairs of a whole number and a function, as branch_fns, "
            f"got {branch_fns!r}"
        )
    if len({index for index, _ in pairs}) < len(pairs):
        raise ProgramError(
            f"{user_line()}: switch_case needs functions, each with an index of its own, got {branch_fns!r}"
        )
    return sorted(((int(index), fn) for index, fn in pairs), key=lambda pair: pair[0])


class Switch:
    """`with switch.case(condition):` blocks of which the first true one is run, else that of `switch.default()`.

    They return nothing: they write variables from outside. Used as `with fluid.layers.Switch() as switch:`.
    """

    def __init__(self, name: str | None = None) -> None:
        self._none: Any = None  # whether no condition so far was true
        self._name = name
        self._ended = False

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    @contextmanager
    def case(self, condition: Any) -> Iterator[None]:
        """Record the block of a condition."""
        expect_condition("Switch.case", condition)
        chosen = condition if self._none is None else torch.logical_and(self._none, condition)
        opposite: Any = torch.logical_not(condition)
        self._none = opposite if self._none is None else torch.logical_and(self._none, opposite)
        with self._block(chosen):
            yield

    @contextmanager
    def default(self) -> Iterator[None]:
        """Record the block of no condition. Raises ProgramError before the first case."""
        if self._none is None:
            raise ProgramError(f"{user_line()}: Switch.default() stands before the first case()")
        with self._block(self._none):
            yield

    @contextmanager
    def _block(self, chosen: Any) -> Iterator[None]:
        main = default_main_program()
        recording = recording_of(main)
        with name_scope(self._name or main.unique("switch")):
            with recorded_block(recording) as block:
                yield
                recorded = block.close()
            _choose(recording, chosen, recorded, Recorded((), {}, (), ()), ((), ()))


# ---------------------------------------------------------------- loops


class While:
    """`with While(cond).block():` a block that is run again as long as `cond`, a bool variable that it writes, is true.

    Gradients go through all iterations, whose values are computed once more for them.
    """

    def __init__(self, cond: Any, is_test: bool = False, name: str | None = None) -> None:
        expect_condition("While", cond)
        self._cond = cond
        self._name = name

    @contextmanager
    def block(self) -> Iterator[None]:
        """Record the block. Raises ProgramError if it does not write the condition."""
        main = default_main_program()
        recording = recording_of(main)
        with name_scope(self._name or main.unique("while")):
            with recorded_block(recording) as block:
                block.repeats = True
                yield
                settle(recording, block)
                recorded = block.close([recording.own(self._cond).name])
            _repeat(recording, recording.own(self._cond).name, recorded)


def _repeat(recording: Recording, condition: str, recorded: Recorded) -> None:
    if condition not in recorded.writes:
        raise ProgramError(
            f"{user_line()}: the block of a While does not write its condition {condition!r}, so it would never end. "
            "Compare again at its end: layers.less_than(i, n, cond=condition)",
            variable=condition,
        )
    carried = list(dict.fromkeys((condition, *recorded.writes)))
    inputs = list(dict.fromkeys((*carried, *recorded.reads)))
    symbols = symbols_of(recording, [recorded], inputs)
    block = sub_block(recording, recorded, inputs, carried, symbols)
    made = control(recording, "while", inputs, [block], [len(carried)])
    for name, tensor in zip(carried, made, strict=True):
        take_over(recording, name, tensor)


def expect_name(what: str, name: object) -> None:
    """Raise ArgumentError unless `name` is a text or None."""
    if name is not None and not isinstance(name, str):
        raise ArgumentError(f"{user_line()}: {what}: name is {name!r}; expected a text or None")


def _is_array(value: Any) -> bool:
    return bool(value.desc.kind == "array")
