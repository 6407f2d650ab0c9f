"""What a predictor is given and returns: PaddleTensor, its values as a PaddleBuf, and their types.

Source: paddle/fluid/pybind/inference_api.cc (Fluid 1.8).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from penstock.errors import FeedError
from penstock.lod_tensor import LoDTensor


class PaddleDType(Enum):
    """The types of a PaddleTensor's elements, by numpy's names."""

    FLOAT32 = "float32"
    INT64 = "int64"
    INT32 = "int32"


class PaddlePlace(Enum):
    """Kinds of places."""

    UNK = -1
    CPU = 0
    GPU = 1


class PaddleBuf:
    """The values of a PaddleTensor, in one line. `data`: an array or numbers, or a size in bytes of zeros."""

    def __init__(self, data: Any = ()) -> None:
        self._values: np.ndarray = np.zeros(0, np.float32)
        if isinstance(data, int):
            self.resize(data)
        else:
            self.reset(data)

    def reset(self, data: Any) -> None:
        """Take other values; numbers with a fraction as float32, whole ones as they are in numpy."""
        array = np.asarray(data)
        self._values = np.array(array, np.float32 if array.dtype == np.float64 else array.dtype).reshape(-1)

    def resize(self, size: int) -> None:
        """Have `size` bytes of zeros."""
        self._values = np.zeros(size, np.uint8)

    @property
    def kind(self) -> PaddleDType:
        """The type that the values were given in. Raises FeedError for one that no tensor has."""
        try:
            return PaddleDType(self._values.dtype.name)
        except ValueError as error:
            kinds = ", ".join(one.value for one in PaddleDType)
            raise FeedError(f"PaddleTensor is given {self._values.dtype.name}; expected one of {kinds}") from error

    def empty(self) -> bool:
        """Whether there are no values."""
        return not self._values.size

    def length(self) -> int:
        """Return the number of bytes."""
        return int(self._values.nbytes)

    def float_data(self) -> list[float]:
        """Return the values, read as float32."""
        return self.tolist("float32")

    def int64_data(self) -> list[int]:
        """Return the values, read as int64."""
        return self.tolist("int64")

    def int32_data(self) -> list[int]:
        """Return the values, read as int32."""
        return self.tolist("int32")

    def tolist(self, dtype: str) -> list[Any]:
        """Return the values, read as `dtype`."""
        return list(self.array(PaddleDType(dtype)).tolist())

    def array(self, dtype: PaddleDType) -> np.ndarray:
        """Return the values, their bytes read as `dtype`."""
        return self._values.view(dtype.value)


class PaddleTensor:
    """Values with sizes, a type and the offsets of sequences. `data`: an array, or None to set the parts."""

    def __init__(self, data: Any = None, name: str = "", copy: bool = True) -> None:
        array = np.zeros(0, np.float32) if data is None else np.asarray(data)
        self.name = name
        self.data = PaddleBuf(array)
        self.shape = list(array.shape)
        self.lod: list[list[int]] = []
        self.dtype = self.data.kind

    def as_ndarray(self) -> np.ndarray:
        """Return the values as an array. Raises FeedError if they do not fill the sizes."""
        values = self.data.array(self.dtype)
        if values.size != int(np.prod(self.shape)):
            raise FeedError(
                f"PaddleTensor {self.name!r} has {values.size} values of {self.dtype.value} and the sizes "
                f"{list(self.shape)}",
                variable=self.name,
            )
        return values.reshape(self.shape)


def array_of(tensor: PaddleTensor) -> LoDTensor:
    """Return what an executor is fed. Raises FeedError if the parts of the tensor do not fit."""
    found = LoDTensor(tensor.as_ndarray())
    if tensor.lod:
        found.set_lod(tensor.lod)
    return found


def tensor_of(name: str, value: LoDTensor) -> PaddleTensor:
    """Return what was fetched; float64 as float32, bool and smaller whole numbers as int32."""
    array = np.asarray(value)
    if array.dtype.name not in {kind.value for kind in PaddleDType}:
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    made = PaddleTensor(array, name)
    made.lod = [list(level) for level in value.lod()]
    return made


__all__ = ["PaddleBuf", "PaddleDType", "PaddlePlace", "PaddleTensor"]
