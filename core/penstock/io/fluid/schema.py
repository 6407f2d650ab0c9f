"""Messages of Fluid's files, read and written by the protobuf library.

`__model__` is a ProgramDesc; each tensor has a TensorDesc before its bytes. The fields that 1.5 to 1.8 have in common
are described here; others are kept by the library as unknown ones. The library checks wire format and sizes: a length
that lies is an error before anything of that size is allocated.

Source: framework.proto (Fluid 1.8).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from penstock.errors import UserError

if TYPE_CHECKING:
    from google.protobuf import descriptor_pb2, descriptor_pool

_PACKAGE = "penstock.fluid"
_KINDS = {"int32": 5, "int64": 3, "float": 2, "double": 1, "bool": 8, "string": 9}
_LABELS = {"": 1, "!": 2, "*": 3}  # optional, required, repeated
_MESSAGES = {
    "TensorDesc": "1!data_type:int32 2*dims:int64",
    "LoDTensorDesc": "1!tensor:TensorDesc 2lod_level:int32",
    "VarType": "1!type:int32 2selected_rows:TensorDesc 3lod_tensor:LoDTensorDesc 4tensor_array:LoDTensorDesc",
    "VarDesc": "1!name:string 2!type:VarType 3persistable:bool 4need_check_feed:bool",
    "OpVar": "1!parameter:string 2*arguments:string",
    "OpAttr": (
        "1!name:string 2!type:int32 3i:int32 4f:float 5s:string 6*ints:int32 7*floats:float 8*strings:string 10b:bool "
        "11*bools:bool 12block_idx:int32 13l:int64 14*blocks_idx:int32 15*longs:int64 16*float64s:double "
        "19float64:double"
    ),
    "OpDesc": "1*inputs:OpVar 2*outputs:OpVar 3!type:string 4*attrs:OpAttr",
    "BlockDesc": "1!idx:int32 2!parent_idx:int32 3*vars:VarDesc 4*ops:OpDesc",
    "Version": "1version:int64",
    "ProgramDesc": "1*blocks:BlockDesc 4version:Version",
}

# What kind of value an attribute has (AttrType), to the field that holds it.
ATTRIBUTE_FIELDS = {
    0: "i", 1: "f", 2: "s", 3: "ints", 4: "floats", 5: "strings", 6: "b", 7: "bools", 8: "block_idx", 9: "l",
    10: "blocks_idx", 11: "longs", 12: "float64s", 15: "float64",
}  # fmt: skip
# VarType.Type of what is no number
LOD_TENSOR, SELECTED_ROWS, FEED_MINIBATCH, FETCH_LIST, LOD_TENSOR_ARRAY, READER, RAW = 7, 8, 9, 10, 13, 15, 17
# VarType.Type of numbers
DTYPES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64", 20: "uint8", 21: "int8",
    22: "bfloat16", 23: "complex64", 24: "complex128",
}  # fmt: skip


@cache
def message(name: str) -> Any:
    """Return the class of a message: `message("ProgramDesc")`."""
    from google.protobuf import message_factory  # only where files of Fluid are read: a process of a job has none

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.{name}"))


def parsed(name: str, content: bytes, path: str) -> Any:
    """Return the message in `content`, read from `path`. Raises UserError for what is none."""
    from google.protobuf.message import DecodeError  # as in `message`

    try:
        return message(name).FromString(content)
    except DecodeError as error:
        raise UserError(
            f"{path} holds no {name} of Fluid: {error}. It is damaged, or was not written by PaddlePaddle", file=path
        ) from error


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    from google.protobuf import descriptor_pb2, descriptor_pool  # as in `message`

    file = descriptor_pb2.FileDescriptorProto(name="penstock/fluid.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for text in fields.split():
            _add_field(described, text)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(described: descriptor_pb2.DescriptorProto, text: str) -> None:
    """Add a field: number, label, name and kind, as "2*dims:int64"."""
    name, _, kind = text.lstrip("0123456789").partition(":")
    number = int(text[: len(text) - len(name) - len(kind) - 1])
    label = _LABELS.get(name[0], 1)
    field = described.field.add(name=name.lstrip("!*"), number=number)
    field.label = label  # type: ignore[assignment]  # enumerations are int at run time
    field.type = _KINDS.get(kind, 11)  # type: ignore[assignment]
    if kind not in _KINDS:
        field.type_name = f".{_PACKAGE}.{kind}"
