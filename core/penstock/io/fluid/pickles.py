"""`.pdparams` and `.pdopt`: what `fluid.save` pickles, a dict of names to NumPy arrays.

No class of a pickle is looked up: of the names in it, those that NumPy's arrays of numbers need stand for builders of
this module, every other name is an error. Before the pickle runs, its opcodes are checked: only those of such dicts,
and no size or memo index beyond the file. Written are pickles of protocol 2, as Fluid does.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import UserError
from penstock.io.saves.manifest import Damaged

_OPCODES = frozenset(
    [
        "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE",
        "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "NONE", "NEWTRUE", "NEWFALSE",
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
        "STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "GLOBAL", "STACK_GLOBAL",
        "REDUCE", "BUILD", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
    ]
)  # fmt: skip
_NUMBERS = "biufc"  # kinds of NumPy dtypes


class _Dtype:
    """What NumPy pickles as `dtype("f4", False, True)` and a state that begins with (version, byte order)."""

    def __init__(self, code: str, *_: object) -> None:
        self._code, self._order = str(code), "="

    def __setstate__(self, state: Any) -> None:
        self._order = str(state[1])

    def numpy(self) -> np.dtype[Any]:
        """Return the dtype. Raises ValueError for one that is no number."""
        found = np.dtype(self._code)
        if found.kind not in _NUMBERS:
            raise ValueError(f"an array of {found}, which are no numbers")
        return found.newbyteorder(">") if self._order == ">" else found.newbyteorder("<")


class _Array:
    """What NumPy pickles as an empty array and the state (version, shape, dtype, Fortran order, bytes)."""

    def __init__(self) -> None:
        self.array: np.ndarray = np.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        kind, content = dtype.numpy(), raw.encode("latin1") if isinstance(raw, str) else bytes(raw)
        if math.prod(shape) * kind.itemsize != len(content):
            raise ValueError(f"an array {kind}{list(shape)} of {len(content)} bytes")
        self.array = np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _scalar(dtype: _Dtype, raw: Any) -> Any:
    return np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype.numpy(), count=1)[0]


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"text in {encoding!r}")
    return text.encode("latin1")


class _Builder:
    """A function that a pickle may call, but not change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: object) -> Any:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise ValueError("it changes a function")


_BUILDERS: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        (f"numpy.{core}.multiarray", name): builder
        for core in ("core", "_core")
        for name, builder in (("_reconstruct", _Builder(_reconstruct)), ("scalar", _Builder(_scalar)))
    },
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Builder(_encode),
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        builder = _BUILDERS.get((module, name))
        if builder is None:
            raise ValueError(f"it names {module}.{name}, which no array of numbers needs, so nothing of it is loaded")
        return builder


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Return the arrays of a file by name. Raises UserError if it holds anything else; then nothing of it has run."""
    content = path.read_bytes()
    try:
        _check_opcodes(content)
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
    except (
        ValueError,
        TypeError,
        LookupError,
        EOFError,
        AttributeError,
        OverflowError,
        pickle.UnpicklingError,
    ) as error:
        raise Damaged(
            f"{path} is no file of fluid.save, or is damaged: {error}. Use another copy of it", file=str(path)
        ) from error
    if not isinstance(found, dict):
        raise UserError(
            f"{path} holds a {type(found).__name__}; expected the dict of arrays that fluid.save writes", file=str(path)
        )
    return {name: _tensor(name, value, path) for name, value in found.items() if name != "StructuredToParameterName@@"}


def _check_opcodes(content: bytes) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content), 1):
        if opcode.name not in _OPCODES:
            raise ValueError(f"it has the opcode {opcode.name}")
        if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise ValueError(f"it has the memo index {argument} after {count} opcodes")


def _tensor(name: Any, value: Any, path: Path) -> torch.Tensor:
    if not isinstance(name, str) or not isinstance(value, (_Array, np.generic)):
        raise UserError(
            f"{path} holds {name!r} of {type(value).__name__}; expected names with arrays, as fluid.save writes them",
            file=str(path),
        )
    array = value.array if isinstance(value, _Array) else np.asarray(value)
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def write_pickle(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write arrays by name, as `fluid.save` does. Raises UserError for bfloat16, which NumPy lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            raise UserError(f"{path}: {name!r} is bfloat16, which {path.suffix} cannot hold", file=str(path))
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    path.write_bytes(pickle.dumps(arrays, protocol=2))
