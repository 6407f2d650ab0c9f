"""The text form of a Program, and the grammar that reads it back. `parse(str(p)) == p`.

    program  := "program" "version=1" "seed=" int ["test"] "symbols=[" names "]" { line }
    line     := block | "var" name ":" dtype "[" dims "]" { flag }
              | "guard" dim relation dim ["at" string]
              | "op" name type "(" args ")" ["->" outputs] { clause }
    block    := "block" int "inputs=[" names "]" "symbols=[" names "]" "outputs=[" names "]" { line } "end"
    arg      := none | true | false | int | float | string | "%"name | kind":"value | "block:"int | dim | "[" args "]"
    dim      := product { "+" product };  product := atom { ("*" | "//" | "%") atom }
    atom     := int | symbol | ("max" | "min") "(" dims ")" | "(" dim ")"

A block stands before the operator that names it; its number is that of `Program.block`. Names that are no plain
identifiers are quoted. Nothing is evaluated; unknown words are errors with line and column.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProgramError
from penstock.program.ir import (
    Arg,
    Guard,
    Operator,
    Output,
    Ref,
    Role,
    Structure,
    SubBlock,
    TorchConst,
    VarDesc,
    sub_blocks,
)
from penstock.program.text_line import Line

_KINDS = ("array", "unsized")
_FLAGS = ("persistable", "parameter", "buffer", "distributed", "feed", "loose", *_KINDS)
_NUMBERS = ("lod", "admit_after", "expire_after_s")  # words of a variable with a number
_PLAIN = re.compile(r"[A-Za-z_@][A-Za-z0-9_.@/]*\Z")
_ROLES = {r.name: r for r in Role}


# -- writing ---------------------------------------------------------------------------------------


def _name(name: str) -> str:
    return name if _PLAIN.match(name) else json.dumps(name)


def _arg(value: Arg, blocks: Iterator[int] = iter(())) -> str:  # noqa: B008 - empty
    if isinstance(value, SubBlock):
        return f"block:{next(blocks)}"
    if isinstance(value, Ref):
        return "%" + _name(value.name)
    if isinstance(value, TorchConst):
        return f"{value.kind}:{_name(value.value)}"
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if not math.isfinite(value) or any(c in repr(value) for c in ".e") else f"{value!r}.0"
    if isinstance(value, tuple):
        return "[" + ", ".join(_arg(v, blocks) for v in value) + "]"
    return str(value)


def _output(value: Output) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join("%" + _name(v) for v in value) + "]"
    return "none" if value is None else "%" + _name(value)


def _var_line(v: VarDesc) -> str:
    parts = [f"var {_name(v.name)} : {v.dtype}[{', '.join(str(d) for d in v.shape)}]"]
    parts += [flag for flag in _FLAGS if (v.kind == flag if flag in _KINDS else getattr(v, flag))]
    parts += ["frozen"] if not v.trainable else []
    parts += [f"view={_name(v.storage)}"] if v.storage != v.name else []
    parts += [f"rows={_name(v.rows)} values={_name(v.values)}"] if v.kind == "selected_rows" else []
    parts += [f"admit_after={v.admit_after}"] if v.admit_after else []
    parts += [f"expire_after_s={_arg(v.expire_after_s)}"] if v.expire_after_s is not None else []
    parts += [f"lod={v.lod_level}"] if v.lod_level else []
    parts += [f"at={json.dumps(v.source)}"] if v.source else []
    return " ".join(parts)


def _op_line(op: Operator, blocks: Iterator[int]) -> str:
    args = [_arg(a, blocks) for a in op.args] + [f"{k}={_arg(v, blocks)}" for k, v in op.kwargs]
    parts = [f"op {_name(op.name)} {op.type}({', '.join(args)})"]
    parts += ["-> " + ", ".join(_output(o) for o in op.outputs)] if op.outputs else []
    parts += [f"writes=[{', '.join(_name(w) for w in op.writes)}]"] if op.writes else []
    parts += ["role=" + "+".join(r.name or "" for r in op.role)]
    parts += [f"of=[{', '.join(_name(n) for pair in op.role_vars for n in pair)}]"] if op.role_vars else []
    parts += [f"module={json.dumps(op.module)}"] if op.module else []
    parts += [f"at={json.dumps(op.source)}"] if op.source else []
    parts += ["train_only"] if op.train_only else []
    parts += [f"block={op.block}"] if op.block else []
    return " ".join(parts)


def _op_lines(op: Operator, numbers: Iterator[int]) -> Iterator[str]:
    """The blocks of an operator, each before those in it, and its own line."""
    own = []
    for block in sub_blocks(op):
        own.append(next(numbers))
        yield from _block_lines(block, own[-1], numbers)
    yield _op_line(op, iter(own))


def _block_lines(block: SubBlock, number: int, numbers: Iterator[int]) -> Iterator[str]:
    lists = (("inputs", block.inputs), ("symbols", block.symbols), ("outputs", block.outputs))
    yield " ".join([f"block {number}", *(f"{word}=[{', '.join(map(_name, names))}]" for word, names in lists)])
    yield from (f"  {_var_line(v)}" for v in block.variables)
    yield from (f"  {line}" for op in block.operators for line in _op_lines(op, numbers))
    yield "end"


@functools.lru_cache(maxsize=1024)
def block_text(block: SubBlock) -> str:
    """Return the text of a block alone, in which it is block 1: how its operator's kernel gets it."""
    return "\n".join(_block_lines(block, 1, itertools.count(2))) + "\n"


def to_text(program: Structure) -> str:
    """Return the text form: one line a variable, guard and operator, blocks as sections."""
    test = " test" if program.is_test else ""
    head = f"program version=1 seed={program.seed}{test} symbols=[{', '.join(program.symbols)}]"
    lines = [head, *(_var_line(v) for v in program.variables.values())]
    lines += [f"guard {g}" + (f" at={json.dumps(g.source)}" if g.source else "") for g in program.guards]
    numbers = itertools.count(1 + max((op.block for op in program.operators), default=0))
    lines += [line for op in program.operators for line in _op_lines(op, numbers)]
    return "\n".join(lines) + "\n"


# -- reading ---------------------------------------------------------------------------------------


def parse_structure(text: str) -> Structure:
    """Read a Program from its text form. Raises ProgramError with line and column."""
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ProgramError("the text of the program is empty")
    program = _head(Line(lines[0][1], lines[0][0], []))
    _read_lines(lines[1:], program)
    return program


def _read_lines(lines: list[tuple[int, str]], program: Structure) -> dict[int, SubBlock]:
    """Read lines into a program; return the blocks that no operator of it names."""
    blocks: dict[int, SubBlock] = {}
    open_blocks: list[_OpenBlock] = []
    for number, text in lines:
        inner = open_blocks[-1].inside if open_blocks else program
        line = Line(text, number, inner.symbols, blocks)
        try:
            if line.peek("block") and len(line.tokens) > 1 and line.tokens[1].kind == "number":
                open_blocks.append(_block_head(line))
            elif line.peek("end") and open_blocks:
                line.at += 1
                closed = open_blocks.pop()
                blocks[closed.number] = closed.block()
            else:
                _read(line, inner)
            if not line.done():
                raise line.fail("the end of the line")
        except RecursionError:
            raise ProgramError(f"line {number}: expressions or lists are nested too deeply", line=number) from None
    if open_blocks:
        raise ProgramError(f"block {open_blocks[-1].number} has no 'end'")
    return blocks


@dataclass(slots=True)
class _OpenBlock:
    number: int
    inputs: list[str]
    outputs: list[str]
    inside: Structure

    def block(self) -> SubBlock:
        inside = self.inside
        variables, operators = tuple(inside.variables.values()), tuple(inside.operators)
        return SubBlock(tuple(self.inputs), tuple(self.outputs), tuple(inside.symbols), variables, operators)


def _block_head(line: Line) -> _OpenBlock:
    line.take("block")
    number = int(line.number_value())
    lists = []
    for word in ("inputs", "symbols", "outputs"):
        line.take(word)
        line.take("=")
        lists.append(line.names())
    return _OpenBlock(number, lists[0], lists[2], Structure(symbols=lists[1]))


@functools.lru_cache(maxsize=1024)
def parse_block(text: str) -> SubBlock:
    """Read a block from the text that `block_text` gives. Raises ProgramError."""
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    blocks = _read_lines(lines, Structure())
    if len(blocks) != 1:
        raise ProgramError(f"expected the text of one block, got {len(blocks)}")
    return blocks.popitem()[1]


def _read(line: Line, program: Structure) -> None:
    word = line.word("'var', 'guard' or 'op'")
    if word == "var":
        var = _variable(line)
        if var.name in program.variables:
            raise ProgramError(
                f"line {line.number}: variable {var.name!r} is described a second time", line=line.number
            )
        program.variables[var.name] = var
    elif word == "guard":
        program.guards.append(_guard(line))
    elif word == "op":
        program.operators.append(_operator(line))
    else:
        line.at = 0
        raise line.fail("'var', 'guard' or 'op'")


def _head(line: Line) -> Structure:
    line.take("program")
    line.take("version")
    line.take("=")
    if not line.accept("1"):
        raise line.fail("version 1")
    line.take("seed")
    line.take("=")
    if line.kind() != "number":
        raise line.fail("a number")
    seed = int(line.number_value())
    is_test = line.accept("test")
    line.take("symbols")
    line.take("=")
    return Structure(seed=seed, is_test=is_test, symbols=line.names())


def _variable(line: Line) -> VarDesc:
    name = line.word()
    line.take(":")
    dtype = line.word("a dtype")
    line.take("[")
    fields: dict[str, Any] = {"shape": tuple(line._until("]", line.dim))}
    while not line.done():
        word = line.word("a flag")
        if word in _KINDS:
            fields["kind"] = word
        elif word in _FLAGS:
            fields[word] = True
        elif word == "frozen":
            fields["trainable"] = False
        elif word in ("view", "rows", "values", "at", *_NUMBERS):
            line.take("=")
            key = {"view": "storage", "at": "source", "lod": "lod_level"}.get(word, word)
            fields[key] = line.number_value() if word in _NUMBERS else line.word()
        else:
            line.at -= 1
            raise line.fail("a flag of a variable")
    if "rows" in fields:
        fields["kind"] = "selected_rows"
    return VarDesc(name=name, dtype=dtype, **fields)


def _guard(line: Line) -> Guard:
    left = line.dim()
    relation = next((r for r in ("==", "!=", "<=", ">=", "<", ">") if line.accept(r)), None)
    if relation is None:
        raise line.fail("a relation")
    right = line.dim()
    source = ""
    if line.accept("at"):
        line.take("=")
        source = line.word()
    return Guard(left, relation, right, source)  # type: ignore[arg-type]  # one of the relations


def _operator(line: Line) -> Operator:
    name, type_ = line.word(), line.word("an operator type")
    line.take("(")
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []
    while not line.accept(")"):
        if line.kind() == "name" and line.peek("=", 1):
            key = line.word()
            line.take("=")
            kwargs.append((key, line.argument()))
        else:
            args.append(line.argument())
        if not line.peek(")"):
            line.take(",")
    fields: dict[str, Any] = {"outputs": ()}
    if line.accept("->"):
        outputs = [line.output()]
        while line.accept(","):
            outputs.append(line.output())
        fields["outputs"] = tuple(outputs)
    _clauses(line, fields)
    return Operator(name=name, type=type_, args=tuple(args), kwargs=tuple(kwargs), **fields)


def _clauses(line: Line, fields: dict[str, Any]) -> None:
    while not line.done():
        word = line.word("a clause")
        if word == "train_only":
            fields["train_only"] = True
            continue
        line.take("=")
        if word == "writes":
            fields["writes"] = tuple(line.names())
        elif word == "of":
            names = line.names()
            if len(names) % 2:
                raise line.fail("pairs of a parameter and its gradient")
            fields["role_vars"] = tuple(zip(names[::2], names[1::2], strict=True))
        elif word == "role":
            fields["role"] = _role(line)
        elif word == "block":
            fields["block"] = _block(line)
        elif word in ("module", "at"):
            fields["module" if word == "module" else "source"] = line.word()
        else:
            line.at -= 2
            raise line.fail("a clause of an operator")


def _block(line: Line) -> int:
    number = line.number_value() if line.kind() == "number" else 0
    if not isinstance(number, int) or number < 1:
        raise line.fail("the number of a block from 1 on")
    return number


def _role(line: Line) -> Role:
    role = Role(0)
    while True:
        word = line.word("a role")
        if word not in _ROLES:
            line.at -= 1
            raise line.fail(f"one of {', '.join(str(r) for r in _ROLES)}")
        role |= _ROLES[word]
        if not line.accept("+"):
            return role
