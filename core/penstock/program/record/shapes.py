"""Shapes of ATen calls on fakes: torch's own kernels for the meta device, run at a few batches.

A call without a symbol among its operands is run once. Any other is run at several concrete values of its symbols, and
sizes, strides and offsets of the results become expressions (fitting.py). A call whose results cannot be expressed so
turns the batch into a number: an error. Nothing is computed; only an operator without a kernel for the meta device runs
on small CPU tensors of zeros.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.compat.torch import as_kernel, schema_of, storage_id, tree_flatten, tree_map, tree_unflatten
from penstock.errors import ProgramError
from penstock.program.record import arithmetic, known_shapes
from penstock.program.record.arithmetic import Atom, Size
from penstock.program.record.described import DESCRIBED
from penstock.program.record.divisors import divisor_of_rows, largest_divisor
from penstock.program.record.fakes import CPU, META, Fake, empty_fake, fake_of, kernels
from penstock.program.record.fitting import FACTORS, Basis, Point, branch, multiple
from penstock.program.record.plain_shapes import PLAIN
from penstock.program.record.sizes import Sizes, size_of

aten = torch.ops.aten
_NUM_POINTS = 5
_FEW = (1, 2, 3, 5, 13, 17, 25, 33)
_SELDOM = 101  # rows: a number that is seldom a width
_ALWAYS = (1, 3)
_LARGE = 1025
_LEAST = 6  # rows of a CPU tensor: kernels divide and pad them
_FEW_RESTS, _MANY_RESTS = 4, 256  # divisors that a few points show, and the largest whose rests are all tried
_REFUSALS = (RuntimeError, IndexError, ValueError, ArithmeticError)
_MOST, _CHEAP = 32, 1 << 18  # rows that are tried, and elements that are
_SMALL, _MANY = 1 << 16, 1 << 22  # elements at the point with many rows: of torch's calls, and of the user's
_PRODUCTS = {aten.mm.default: 2, aten.addmm.default: 2, aten.bmm.default: 3, aten.baddbmm.default: 3}
"""Products of matrices -> dimensions of their factors."""
_MATRICES = {*_PRODUCTS, aten.convolution.default, aten.convolution_backward.default}
"""Calls whose work grows faster than their operands."""
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
"""Of one row they give one dimension less: the batch is never squeezed."""
_DIRECT = {
    aten.detach.default, aten.alias.default, aten.as_strided.default, aten.as_strided_.default,
    aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a tensor at one batch, or of every batch (`Size` for int). `strides`: None for contiguous.

    `owner`: the operand whose memory it has, by its place among the leaves; None: its own memory.
    """

    sizes: tuple[Any, ...]
    strides: tuple[Any, ...] | None
    offset: Any
    dtype: torch.dtype
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """A size with `min` or `max` that the results of a call take for equal to `number`."""

    size: Size
    number: int


class Pinned(ProgramError):
    """A call turns the batch into a number."""


@dataclass(slots=True)
class Call:
    """One ATen call with symbols among its operands."""

    func: Any
    leaves: list[Any]
    structure: Any
    sizes: Sizes
    basis: list[Size]
    step: int
    """Batches differ by multiples of it, so that guards on rests hold."""
    cuts: list[Cut] = field(default_factory=list)

    def at(self, point: Point, device: torch.device) -> list[Layout | Any]:
        """Return the layouts of the results at a point."""

        def concrete(value: Any) -> Any:
            if isinstance(value, Fake):
                return _concrete(value, point, device)
            if isinstance(value, torch.SymInt):
                return size_of(value).value(point)
            return device if isinstance(value, torch.device) else value

        operands = [concrete(leaf) for leaf in self.leaves]
        args, kwargs = tree_unflatten(operands, self.structure)
        out = self.func(*args, **_on(device, self.func, args, kwargs))
        owners = {storage_id(one): i for i, one in enumerate(operands) if isinstance(one, torch.Tensor)}
        return [_layout(leaf, owners) for leaf in tree_flatten(out)[0]]

    def hints(self) -> dict[str, int]:
        """The sizes at hand of the symbols among the operands."""
        return {name: self.sizes.hints[name] for name in _names(self.basis)}

    def layouts(self) -> list[Layout | Any]:
        """Return the layouts of the results for every batch. Raises Pinned, and what torch raises at the hints."""
        if self.func in _PRODUCTS and (product := _product(_PRODUCTS[self.func], self.leaves[:3])) is not None:
            return [product]
        if self._is_cheap():
            try:
                return self._fitted(CPU, self._small_base(), reach=5, most=_SMALL)
            except (Pinned, NotImplementedError, *_REFUSALS):
                pass  # by the kernel for the meta device, which also says what is wrong
        hints = self.hints()
        try:
            return self._fitted(META, hints, reach=40, most=0)
        except NotImplementedError:  # a kernel of the user's, of which nothing is known
            return self._fitted(CPU, self._small_base(), reach=40, most=_MANY)
        except Pinned:
            raise
        except _REFUSALS as error:
            raise self._refused_by_cpu() or error from error

    def of_numbers(self) -> list[Layout | Any]:
        """Return the layouts of the results where symbols stand for numbers."""
        try:
            return [_as_sizes(one) for one in self.at({}, META)]
        except NotImplementedError:
            return [_as_sizes(one) for one in self.at({}, CPU)]

    def _refused_by_cpu(self) -> Exception | None:
        """What eager torch says of such a call, for which it is made once with few rows."""
        point = {name: _SELDOM + (hint - _SELDOM) % self.step for name, hint in self.sizes.hints.items()}
        try:
            self.at(point, CPU)
        except _REFUSALS as error:
            return self._refusal(error, point)
        return None

    def _is_cheap(self) -> bool:
        """Whether a kernel of torch's for the CPU takes less time than the meta device's, which is in Python."""
        if self.func.namespace != "aten" or self.func in _MATRICES or self._cut_atoms():
            return False
        if largest_divisor(self.func, self.leaves, self.structure, self.basis) > _FEW_RESTS:
            return False
        point = dict.fromkeys(_names(self.basis), _MOST)
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Fake)]
        return sum(math.prod(size_of(n).value(point) for n in t.shape) for t in tensors) <= _CHEAP

    def _cut_atoms(self) -> set[Atom]:
        return {atom for size in self.basis for atom in size.atoms() if atom.op in ("min", "max")}

    def _small_base(self) -> dict[str, int]:
        hints = self.hints()
        return {n: _LEAST + (hint - _LEAST) % self.step + i * self.step for i, (n, hint) in enumerate(hints.items())}

    def _points(self, base: Mapping[str, int], reach: int) -> list[dict[str, int]]:
        """Generic points around one, by steps that differ for each symbol; with every rest that a divisor leaves."""
        divisor = largest_divisor(self.func, self.leaves, self.structure, self.basis)
        reach = max(reach, 4 * divisor if divisor > _FEW_RESTS else 0)
        draw = random.Random(len(base))
        found = [dict(base)]
        for number in range(1, _NUM_POINTS + len(base)):
            most = reach * number
            found.append({name: value + self.step * (draw.randrange(most) + 1) for name, value in base.items()})
        if _FEW_RESTS < divisor <= _MANY_RESTS:
            found += [{n: at + self.step * i for n, at in base.items()} for i in range(1, 2 * divisor + 1)]
        return found

    def _fitted(self, device: torch.device, base: dict[str, int], *, reach: int, most: int) -> list[Layout | Any]:
        """Layouts by kernels of a device, around a point. `most`: elements on the CPU, where there are many rows."""
        base, first = self._first(base, device)
        points = self._points(base, reach)
        if device is CPU:
            points[-1] = self._large(base, most)
        try:
            answers = [first, *(self.at(point, device) for point in points[1:])]
        except _REFUSALS:  # a call such as reshape(5, -1) takes the multiples of a batch that it takes
            apart = bool(base.keys() & self.sizes.declared.keys())
            points = [multiple(base, number, apart=apart) for number in range(len(FACTORS))]
            answers = [first, *self._multiples(points[1:], device)]
        few = self._few(base)
        small = [self._answer(point, device) for point in few]
        every = [*points, *(point for point, found in zip(few, small, strict=True) if found is not None)]
        fitted = _fit(self.basis, every, len(points), [*answers, *(found for found in small if found is not None)])
        if fitted is None or None in small:
            self._cut(points)
            if self.cuts or self.func in _SQUEEZES:
                fitted = fitted or _fit(self.basis, points, len(points), answers)
        if fitted is None:
            raise self._pinned("")
        return fitted

    def _first(self, base: dict[str, int], device: torch.device) -> tuple[dict[str, int], list[Layout | Any]]:
        """A point where the call succeeds and its answer: `base`, or a multiple that shapes divide."""
        try:
            return base, self.at(base, device)
        except NotImplementedError:
            raise
        except _REFUSALS as error:
            divided = {name: at * divisor_of_rows(self.leaves, self.basis) for name, at in base.items()}
            if divided == base or (answer := self._answer(divided, device)) is None:
                raise self._refusal(error, base) from error
            return divided, answer

    def _answer(self, point: Point, device: torch.device) -> list[Layout | Any] | None:
        try:
            return self.at(point, device)
        except _REFUSALS:
            return None

    def _multiples(self, points: Sequence[Point], device: torch.device) -> list[list[Layout | Any]]:
        try:
            return [self.at(point, device) for point in points]
        except _REFUSALS as error:
            raise self._pinned(str(error)) from error

    def _few(self, base: Point) -> list[dict[str, int]]:
        """Points with few rows, and one for each other branch of a cut size."""
        cuts = self._cut_atoms()
        found: list[dict[str, int]] = []
        for number in _FEW:
            point = {name: number + (hint - number) % self.step for name, hint in base.items()}
            other = any(branch(atom, point) != branch(atom, base) for atom in cuts)
            if point not in found and (number in _ALWAYS or other):
                found.append(point)
        return found

    def _large(self, base: Point, most: int) -> dict[str, int]:
        """A point with many rows, as far as operands of `most` elements have them."""
        shapes = [[size_of(n).number for n in leaf.shape] for leaf in self.leaves if isinstance(leaf, Fake)]
        a_row = sum(math.prod(n for n in shape if n is not None) for shape in shapes)
        alone = all(shape.count(None) < 2 for shape in shapes)
        least = max(min(_LARGE, most // max(1, a_row)) if alone else 0, _LEAST + 7)
        return {n: least + (at - least) % self.step + 2 * self.step * i for i, (n, at) in enumerate(base.items())}

    def _cut(self, points: Sequence[Point]) -> None:
        for size in self.basis:
            values = {size.value(point) for point in points}
            if len(values) == 1 and any(atom.op in ("min", "max") for atom in size.atoms()):
                self.cuts.append(Cut(size, values.pop()))

    def _pinned(self, why: str) -> Pinned:
        hint = next(iter(self.sizes.hints.values()))
        return Pinned(f"torch itself turns the batch size into the number {hint} there{why and ': '}{why}")

    def _refusal(self, error: Exception, point: Point) -> Exception:
        """The error with -1 for every size that follows from the batch."""
        numbers = sorted({size.value(point) for size in self.basis} | set(point.values()), reverse=True)
        text = re.sub(rf"(?<!\d)(?:{'|'.join(map(str, numbers))})(?!\d)", "-1", str(error))
        return type(error)(text)


def _product(num_dims: int, operands: Sequence[Any]) -> Layout | None:
    """The layout of a product of matrices, or batches of them; None if torch's kernel has to say what is wrong."""
    *biases, left, right = (leaf for leaf in operands if isinstance(leaf, Fake))
    if {left.dim(), right.dim()} != {num_dims}:
        return None
    shapes = [[size_of(n) for n in leaf.shape] for leaf in (left, right)]
    (*batch, rows, inner), (*same, depth, width) = shapes
    sizes = (*batch, rows, width)
    if batch != same or inner != depth or left.dtype != right.dtype:
        return None
    for bias in biases:
        given = [size_of(n) for n in bias.shape]
        fits = all(one in (own, arithmetic.ONE) for one, own in zip(given[::-1], sizes[::-1], strict=False))
        if bias.dtype != left.dtype or len(given) > len(sizes) or not fits:
            return None
    return Layout(sizes, None, arithmetic.constant(0), left.dtype)


def _names(sizes: Sequence[Size]) -> list[str]:
    return list(dict.fromkeys(atom.key for size in sizes for atom in size.atoms() if atom.op == "sym"))


def _concrete(fake: Fake, point: Point, device: torch.device) -> torch.Tensor:
    sizes, strides = ([size_of(n).value(point) for n in part] for part in (fake.shape, fake.stride()))
    tensor = torch.empty_strided(sizes, strides, dtype=fake.dtype, device=device)
    tensor = tensor if device is META else tensor.zero_()
    return tensor.conj() if fake.is_conj() else tensor


def _on(device: torch.device, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call on a device, which is named where nothing else says it."""
    if any(isinstance(leaf, torch.Tensor) for leaf in tree_flatten((args, kwargs))[0]):
        return kwargs
    named = any(argument.name == "device" for argument in schema_of(func).arguments)
    return {**kwargs, "device": device} if named and kwargs.get("device") is None else kwargs


def _layout(value: Any, owners: Mapping[int, int]) -> Layout | Any:
    if not isinstance(value, torch.Tensor):
        return value
    strides = None if value.is_contiguous() else tuple(value.stride())
    owner = owners.get(storage_id(value))
    return Layout(tuple(value.shape), strides, value.storage_offset(), value.dtype, owner)


def _fit(
    sizes: Sequence[Size], points: Sequence[Point], num_regular: int, answers: Sequence[Sequence[Layout | Any]]
) -> list[Layout | Any] | None:
    """Layouts for every batch; None if one has no expression. Strides count at the first `num_regular` points."""
    if len({len(answer) for answer in answers}) > 1:
        return None
    every, regular = Basis(sizes, points), Basis(sizes, points[:num_regular])
    found: list[Layout | Any] = []
    for leaves in zip(*answers, strict=True):
        if not isinstance(leaves[0], Layout):
            if any(leaf != leaves[0] for leaf in leaves):
                return None
            found.append(leaves[0])
            continue
        layout = _fit_one(every, regular, leaves)
        if layout is None:
            return None
        found.append(layout)
    return found


def _fit_one(every: Basis, regular: Basis, leaves: Sequence[Layout]) -> Layout | None:
    if len({(len(leaf.sizes), leaf.owner) for leaf in leaves}) > 1:
        return None
    sizes = _all(every.fit(values) for values in zip(*(leaf.sizes for leaf in leaves), strict=True))
    usual = leaves[: len(regular.points)]
    offset = regular.fit([leaf.offset for leaf in usual])
    if sizes is None or offset is None:
        return None
    if all(leaf.strides is None for leaf in usual):
        return Layout(sizes, None, offset, leaves[0].dtype, leaves[0].owner)
    full = [leaf.strides or _contiguous(leaf.sizes) for leaf in usual]
    strides = _by_order(sizes, usual, full)
    if strides is None:
        strides = _all(regular.fit(values) for values in zip(*full, strict=True))
    return None if strides is None else Layout(sizes, strides, offset, leaves[0].dtype, leaves[0].owner)


def _all(found: Iterator[Size | None]) -> tuple[Size, ...] | None:
    sizes = tuple(found)
    return None if any(size is None for size in sizes) else sizes  # type: ignore[return-value]  # none is None


def _contiguous(sizes: Sequence[Any], order: Sequence[int] | None = None) -> tuple[Any, ...]:
    """Strides of a tensor without gaps, of ints; the first of `order` is the innermost dimension."""
    strides, step = [0] * len(sizes), 1
    for dim in order if order is not None else range(len(sizes) - 1, -1, -1):
        strides[dim], step = step, step * max(sizes[dim], 1)
    return tuple(strides)


def _by_order(
    sizes: Sequence[Size], leaves: Sequence[Layout], strides: Sequence[tuple[int, ...]]
) -> tuple[Size, ...] | None:
    """Strides of a tensor without gaps whose dimensions lie in another order than they are named; else None."""
    shape = leaves[0].sizes
    order = sorted(range(len(shape)), key=lambda dim: (strides[0][dim], shape[dim]))
    if any(_contiguous(leaf.sizes, order) != own for leaf, own in zip(leaves, strides, strict=True)):
        return None
    found, step = {}, arithmetic.ONE
    for dim in order:
        found[dim], step = step, arithmetic.mul(step, sizes[dim])
    return tuple(found[dim] for dim in range(len(shape)))


# ---------------------------------------------------------------- calls


def call_on_fakes(func: Any, args: Any, kwargs: Any, *, step: int = 1) -> tuple[Any, list[Cut]]:
    """Return the fake results of an ATen call, and the sizes that had to be equal to a number.

    `step`: what the numbers of rows that the Program accepts differ by. Raises what torch raises, and Pinned.
    """
    if func in DESCRIBED:
        return DESCRIBED[func](*args, **kwargs), []
    leaves, structure = tree_flatten((args, kwargs))
    basis = _basis(leaves)
    if func in PLAIN and not kwargs and (found := PLAIN[func](*args)) is not None:
        symbolic = next(_symints(leaves), None)
        made = Call(func, leaves, structure, symbolic.node.sizes if symbolic is not None else Sizes(), basis, step)
        plain = [one and Layout(one[0], None, arithmetic.constant(0), one[1]) for one in found]
        return _results(made, args, kwargs, plain), []
    if _is_direct(func) or not any(True for _ in _symints(leaves)):
        return _direct(func, args, kwargs, leaves), []
    sizes = next(_symints(leaves)).node.sizes
    call = Call(func, leaves, structure, sizes, basis, step)
    key = known_shapes.key_of(func, leaves, structure, step)
    known = sizes.shapes.get(key)
    if known is None:
        shared = known_shapes.shared_key(key, leaves, call.hints(), sizes.declared)
        known = known_shapes.recall(shared)
        if known is None:
            with as_kernel(meta=False):
                known = call.layouts() if basis else call.of_numbers(), call.cuts
            known_shapes.keep(shared, known)
        if key is not None:
            sizes.shapes[key] = known
    layouts, cuts = known
    return _results(call, args, kwargs, layouts), cuts


Fake.called = lambda func, args, kwargs: call_on_fakes(func, args, kwargs)[0]


def _is_direct(func: Any) -> bool:
    """Whether a call changes sizes in place, or the type of a view: its kernel takes symbols."""
    return func in _DIRECT or torch.Tag.inplace_view in func.tags


def _symints(leaves: Sequence[Any]) -> Iterator[torch.SymInt]:
    for leaf in leaves:
        if isinstance(leaf, Fake):
            yield from (n for n in (*leaf.shape, *leaf.stride()) if isinstance(n, torch.SymInt))
        elif isinstance(leaf, torch.SymInt):
            yield leaf


def _basis(leaves: Sequence[Any]) -> list[Size]:
    """The sizes of the operands that are no numbers, then the symbols in them and what they are made of."""
    own = list(dict.fromkeys(size_of(n) for n in _symints(leaves)))
    own = [size for size in own if size.number is None]
    atoms = dict.fromkeys(atom for size in own for atom in size.atoms())
    return list(dict.fromkeys([*own, *(Size({(atom,): 1}) for atom in atoms)]))


def _place(leaves: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    named = kwargs.get("device")
    if named is not None:
        return torch.device(named)
    fakes = [leaf for leaf in leaves if isinstance(leaf, Fake)]
    return next((f.place for f in fakes if f.dim()), fakes[0].place if fakes else CPU)


def _direct(func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
    place = _place(leaves, kwargs)
    on_meta = tree_map(lambda value: META if isinstance(value, torch.device) else value, (args, kwargs))
    try:
        with kernels():
            out = func(*on_meta[0], **_on(META, func, *on_meta))
    except NotImplementedError:
        call = Call(func, *tree_flatten((args, kwargs)), Sizes(), [], 1)
        with as_kernel(meta=False):
            return _results(call, args, kwargs, call.of_numbers())
    return tree_map(lambda t: fake_of(t, place) if isinstance(t, torch.Tensor) and not isinstance(t, Fake) else t, out)


def _as_sizes(found: Layout | Any) -> Layout | Any:
    if not isinstance(found, Layout):
        return found
    each = [None if part is None else tuple(map(arithmetic.constant, part)) for part in (found.sizes, found.strides)]
    return Layout(each[0], each[1], arithmetic.constant(found.offset), found.dtype, found.owner)  # type: ignore[arg-type]  # sizes are


def _results(call: Call, args: Any, kwargs: Any, layouts: Sequence[Layout | Any]) -> Any:
    """The results with these layouts, in the form that the schema declares."""
    schema = schema_of(call.func)
    operands = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
    place, queue = _place(call.leaves, kwargs), list(layouts)
    made = [_result(call, spec, schema, operands, place, queue) for spec in schema.returns]
    return None if not made else made[0] if len(made) == 1 else tuple(made)


def _result(call: Call, spec: Any, schema: Any, operands: Any, place: torch.device, queue: list[Any]) -> Any:
    alias = spec.alias_info
    if alias is not None and alias.is_write:
        queue.pop(0)
        written = (a for a in schema.arguments if a.alias_info and a.alias_info.before_set & alias.before_set)
        return operands[next(written).name]
    if str(spec.type).startswith("List"):
        count = len(queue)  # a list is the last result
        return [_made(call, queue.pop(0), place) for _ in range(count)]
    return _made(call, queue.pop(0), place)


def _made(call: Call, layout: Layout | Any, place: torch.device) -> Any:
    if not isinstance(layout, Layout):
        return layout
    of: Callable[[Size], Any] = call.sizes.int_of
    sizes = [of(size) for size in layout.sizes]
    strides = None if layout.strides is None else [of(stride) for stride in layout.strides]
    if layout.owner is None:
        return empty_fake(sizes, strides, layout.dtype, place)
    base = call.leaves[layout.owner]
    if strides is None:
        strides = [of(stride) for stride in arithmetic.contiguous_strides(layout.sizes)]
    with kernels():
        view = aten.as_strided.default(base, sizes, strides, base.storage_offset() + of(layout.offset))
    return fake_of(view, place)
