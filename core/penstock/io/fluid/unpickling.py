"""A reader of pickles that hold containers, numbers, text and NumPy's arrays of numbers, and nothing else.

No class of a pickle is looked up: of the names in it, those that arrays need stand for builders of this module, every
other name is an error, and so is an opcode that such a pickle does not need. Keys of dicts are text or numbers, and of
containers only short tuples of plain values are used twice: what is read is a tree, as deep as it may be, so nothing
takes longer than the file is. No size is believed: `pickletools` takes what a file has.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

_NUMBERS = "biufc"  # kinds of NumPy dtypes
_MOST_DIMENSIONS = 32
_VALUES = frozenset(
    [
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
        "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    ]
)  # fmt: skip
_TEXTS = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING"})  # of Python 2: bytes or text
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Dtype:
    """What NumPy pickles as `dtype("f4", False, True)` and a state that begins with (version, byte order)."""

    def __init__(self, code: object, *_: object) -> None:
        self._code, self._order = _text(code), "="

    def build(self, state: Any) -> None:
        """Take the state."""
        self._order = _text(state[1])

    def numpy(self) -> np.dtype[Any]:
        """Return the dtype. Raises ValueError for one that is no number."""
        found = np.dtype(self._code)
        if found.kind not in _NUMBERS:
            raise ValueError(f"an array of {found}, which are no numbers")
        return found.newbyteorder(">") if self._order == ">" else found.newbyteorder("<")


class _Array:
    """What NumPy pickles as an empty array and the state (version, shape, dtype, Fortran order, bytes)."""

    def __init__(self, *_: object) -> None:
        self.array: np.ndarray = np.empty(0)

    def build(self, state: Any) -> None:
        """Take the state. Raises ValueError for one that does not fit together."""
        _, shape, dtype, fortran, raw = state
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"an array of {len(shape)} dimensions")
        sizes, kind, content = [int(size) for size in shape], dtype.numpy(), _bytes(raw)
        if math.prod(sizes) * kind.itemsize != len(content):
            raise ValueError(f"an array {kind}{sizes} of {len(content)} bytes")
        self.array = np.frombuffer(content, kind).reshape(sizes, order="F" if fortran else "C")


def _scalar(dtype: Any, raw: Any) -> Any:
    return np.frombuffer(_bytes(raw), dtype.numpy(), count=1)[0]


def _encode(text: str, encoding: object) -> bytes:
    if _text(encoding) != "latin1":
        raise ValueError("text in another encoding than latin1")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


def _text(value: object) -> str:
    if not isinstance(value, str | bytes):
        raise TypeError(f"a {type(value).__name__} where text is expected")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else _text(value).encode("latin1")


class _Name:
    """A name of a pickle: what builds its value."""

    __slots__ = ("build_value",)

    def __init__(self, build_value: Callable[..., Any]) -> None:
        self.build_value = build_value


def _ordered(pairs: Iterable[Any] = ()) -> dict[Any, Any]:
    return _with({}, [part for key, value in pairs for part in (key, value)])


_BUILDERS: dict[str, _Name] = {
    **{
        f"numpy.{core}.multiarray {name}": _Name(builder)
        for core in ("core", "_core")
        for name, builder in (("_reconstruct", _Array), ("scalar", _scalar))
    },
    "numpy ndarray": _Name(_Array),
    "numpy dtype": _Name(_Dtype),
    "_codecs encode": _Name(_encode),
    "__builtin__ bytes": _Name(_no_bytes),  # protocol 2 has no empty bytes
    "collections OrderedDict": _Name(_ordered),
}


def unpickled(content: bytes, *, bytes_of_python2: bool = False) -> Any:
    """Return what a pickle holds; arrays in it are for `array_of`. Raises ValueError for anything else.

    `bytes_of_python2`: text of Python 2 is bytes, as for `pickle.load(encoding="bytes")`; else Latin 1.
    """
    try:
        return _Stack(bytes_of_python2=bytes_of_python2).run(content)
    except (TypeError, LookupError, EOFError, AttributeError, OverflowError) as error:
        raise ValueError(str(error) or type(error).__name__) from error


def array_of(value: Any) -> np.ndarray | None:
    """Return a value of `unpickled` as an array, numbers of NumPy too; None if it is none."""
    if isinstance(value, _Array):
        return value.array
    return np.asarray(value) if isinstance(value, np.generic) else None


class _Stack:
    """The stack and the memo of one pickle."""

    def __init__(self, *, bytes_of_python2: bool) -> None:
        self._bytes_of_python2 = bytes_of_python2
        self._items: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._opcodes: dict[str, Callable[[Any], object]] = {
            "PROTO": lambda _: None, "FRAME": lambda _: None, "STOP": lambda _: None,
            "MARK": lambda _: self._marks.append(len(self._items)),
            "POP": lambda _: self._pop(1), "POP_MARK": lambda _: self._behind_mark(),
            "TUPLE": lambda _: self._items.append(tuple(self._behind_mark())),
            "LIST": lambda _: self._items.append(self._behind_mark()),
            "DICT": lambda _: self._items.append(_with({}, self._behind_mark())),
            "APPEND": lambda _: self._extend(self._pop(1)), "APPENDS": lambda _: self._extend(self._behind_mark()),
            "SETITEM": lambda _: self._update(self._pop(2)), "SETITEMS": lambda _: self._update(self._behind_mark()),
            "GLOBAL": self._name, "STACK_GLOBAL": lambda _: self._name(" ".join(map(_text, self._pop(2)))),
            "REDUCE": lambda _: self._items.append(self._reduced(*self._pop(2))),
            "BUILD": lambda _: self._build(*self._pop(1)),
            "MEMOIZE": lambda _: self._put(len(self._memo)),
            **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), self._put),
            **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), self._get),
        }  # fmt: skip

    def run(self, content: bytes) -> Any:
        """Return what the pickle leaves on the stack. Raises ValueError, TypeError, LookupError."""
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            if name in _VALUES:
                self._items.append(argument)
            elif name in _TEXTS:
                self._items.append(_bytes(argument) if self._bytes_of_python2 else argument)
            elif name in _CONSTANTS:
                self._items.append(_CONSTANTS[name])
            elif name in _CONTAINERS:
                self._items.append(_CONTAINERS[name]())
            elif name in _TUPLES:
                self._items.append(tuple(self._pop(_TUPLES[name])))
            elif name in self._opcodes:
                self._opcodes[name](argument)
            else:
                raise ValueError(f"it has the opcode {name}")
        (found,) = self._items
        return found

    def _pop(self, count: int) -> list[Any]:
        if len(self._items) - (self._marks[-1] if self._marks else 0) < count:
            raise ValueError("its stack is empty")
        taken = self._items[-count:]
        del self._items[-count:]
        return taken

    def _behind_mark(self) -> list[Any]:
        start = self._marks.pop()
        taken = self._items[start:]
        del self._items[start:]
        return taken

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._items[-1], list):
            raise TypeError(f"values for a {type(self._items[-1]).__name__}, which is no list")
        self._items[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if not isinstance(self._items[-1], dict):
            raise TypeError(f"keys for a {type(self._items[-1]).__name__}, which is no dict")
        _with(self._items[-1], values)

    def _name(self, name: str) -> None:
        if name not in _BUILDERS:
            shown = name.replace(" ", ".")
            raise ValueError(f"it names {shown}, which no array of numbers needs, so nothing of it is loaded")
        self._items.append(_BUILDERS[name])

    def _reduced(self, name: Any, arguments: Any) -> Any:
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise TypeError(f"it calls a {type(name).__name__}")
        return name.build_value(*arguments)

    def _build(self, state: Any) -> None:
        if not isinstance(self._items[-1], _Array | _Dtype):
            raise TypeError(f"it changes a {type(self._items[-1]).__name__}")
        self._items[-1].build(state)

    def _put(self, index: int) -> None:
        self._memo[index] = self._items[-1]

    def _get(self, index: int) -> None:
        value = self._memo[index]
        if isinstance(value, tuple | list | dict) and not _is_plain(value):
            raise ValueError(f"it uses a {type(value).__name__} twice")
        self._items.append(value)


def _is_plain(value: Any) -> bool:
    """Whether a container is a short tuple of plain values, as the shape of several arrays."""
    return (
        isinstance(value, tuple)
        and len(value) <= _MOST_DIMENSIONS
        and all(isinstance(part, int | float | str | bytes | None) for part in value)
    )


def _with(known: dict[Any, Any], parts: list[Any]) -> dict[Any, Any]:
    """Add keys and values that follow each other."""
    keys, values = parts[::2], parts[1::2]
    for key in keys:
        if not isinstance(key, str | bytes | int):
            raise TypeError(f"a {type(key).__name__} is the key of a dict; expected names")
    known.update(zip(keys, values, strict=True))
    return known
