"""The text form of a Program, and the grammar that reads it back. `parse(str(p)) == p`.

    program  := "program" "version=1" "seed=" int ["test"] "symbols=[" names "]" { line }
    line     := "var" name ":" dtype "[" dims "]" { flag }
              | "guard" dim relation dim ["at" string]
              | "op" name type "(" args ")" ["->" outputs] { clause }
    arg      := none | true | false | int | float | string | "%"name | kind":"value | dim | "[" args "]"
    dim      := product { "+" product };  product := atom { ("*" | "//" | "%") atom }
    atom     := int | symbol | ("max" | "min") "(" dims ")" | "(" dim ")"

Names that are no plain identifiers are quoted. Nothing is evaluated; unknown words are errors with line and column.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Arg, Guard, Operator, Output, Ref, Role, Structure, TorchConst, VarDesc

_FLAGS = ("persistable", "parameter", "buffer", "distributed", "feed")
_NUMBERS = ("lod", "admit_after", "expire_after_s")  # words of a variable with a number
_PLAIN = re.compile(r"[A-Za-z_@][A-Za-z0-9_.@/]*\Z")
_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?(?:inf|nan)\b|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)'
    r"|(?P<name>[A-Za-z_@][A-Za-z0-9_.@/]*)|(?P<mark>->|//|==|!=|<=|>=|[-+*%()\[\]:=,<>]))"
)
_ROLES = {r.name: r for r in Role}
_MAX_DIGITS = 400  # of a number; Python itself refuses to read thousands
_CONSTS = ("dtype", "device", "layout", "memory_format")


# -- writing ---------------------------------------------------------------------------------------


def _name(name: str) -> str:
    return name if _PLAIN.match(name) else json.dumps(name)


def _arg(value: Arg) -> str:
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
        return "[" + ", ".join(_arg(v) for v in value) + "]"
    return str(value)


def _output(value: Output) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join("%" + _name(v) for v in value) + "]"
    return "none" if value is None else "%" + _name(value)


def _var_line(v: VarDesc) -> str:
    parts = [f"var {_name(v.name)} : {v.dtype}[{', '.join(str(d) for d in v.shape)}]"]
    parts += [flag for flag in _FLAGS if getattr(v, flag)]
    parts += ["frozen"] if not v.trainable else []
    parts += [f"view={_name(v.storage)}"] if v.storage != v.name else []
    parts += [f"rows={_name(v.rows)} values={_name(v.values)}"] if v.kind == "selected_rows" else []
    parts += [f"admit_after={v.admit_after}"] if v.admit_after else []
    parts += [f"expire_after_s={_arg(v.expire_after_s)}"] if v.expire_after_s is not None else []
    parts += [f"lod={v.lod_level}"] if v.lod_level else []
    parts += [f"at={json.dumps(v.source)}"] if v.source else []
    return " ".join(parts)


def _op_line(op: Operator) -> str:
    args = [_arg(a) for a in op.args] + [f"{k}={_arg(v)}" for k, v in op.kwargs]
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


def to_text(program: Structure) -> str:
    """Return the text form: one line a variable, guard and operator."""
    test = " test" if program.is_test else ""
    head = f"program version=1 seed={program.seed}{test} symbols=[{', '.join(program.symbols)}]"
    lines = [head, *(_var_line(v) for v in program.variables.values())]
    lines += [f"guard {g}" + (f" at={json.dumps(g.source)}" if g.source else "") for g in program.guards]
    lines += [_op_line(op) for op in program.operators]
    return "\n".join(lines) + "\n"


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    column: int


class _Line:
    """The tokens of one line, and the productions that read them."""

    def __init__(self, text: str, number: int, symbols: list[str]) -> None:
        self.number, self.symbols = number, symbols
        self.tokens: list[_Token] = []
        self.at = 0
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ProgramError(
                    f"line {number}, column {position + 1}: {text[position : position + 20]!r} is no token"
                )
            self.tokens.append(_Token(match.lastgroup or "", match[match.lastgroup or 0], match.start() + 1))
            position = match.end()

    def fail(self, expected: str) -> ProgramError:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        got = f"{token.text!r} at column {token.column}" if token else "the end of the line"
        return ProgramError(f"line {self.number}: expected {expected}, got {got}", line=self.number)

    def peek(self, text: str, ahead: int = 0) -> bool:
        i = self.at + ahead
        return i < len(self.tokens) and self.tokens[i].kind != "string" and self.tokens[i].text == text

    def kind(self) -> str:
        return self.tokens[self.at].kind if self.at < len(self.tokens) else ""

    def take(self, text: str) -> None:
        if not self.peek(text):
            raise self.fail(repr(text))
        self.at += 1

    def accept(self, text: str) -> bool:
        if self.peek(text):
            self.at += 1
            return True
        return False

    def done(self) -> bool:
        return self.at >= len(self.tokens)

    def word(self, expected: str = "a name") -> str:
        if self.kind() not in ("name", "string"):
            raise self.fail(expected)
        token = self.tokens[self.at]
        if token.kind != "string":
            self.at += 1
            return token.text
        try:
            text = str(json.loads(token.text))
        except json.JSONDecodeError:
            raise self.fail("a quoted string with JSON's escapes") from None
        self.at += 1
        return text

    def number_value(self) -> int | float:
        text = self.tokens[self.at].text
        if len(text) > _MAX_DIGITS:
            raise self.fail(f"a number of at most {_MAX_DIGITS} characters")
        self.at += 1
        return float(text) if any(c in text for c in ".einfa") else int(text)

    def names(self) -> list[str]:
        self.take("[")
        found: list[str] = []
        while not self.accept("]"):
            found.append(self.word())
            if not self.peek("]"):
                self.take(",")
        return found

    # dims
    def dim(self) -> Dim:
        return self._chain(("+",), self._product)

    def _product(self) -> Dim:
        return self._chain(("*", "//", "%"), self._atom)

    def _chain(self, marks: tuple[str, ...], operand: Any) -> Dim:
        first = operand()
        mark = next((m for m in marks if self.peek(m)), None)
        if mark is None:
            return first  # type: ignore[no-any-return]  # operand returns Dim
        terms = [first]
        while self.accept(mark):
            terms.append(operand())
        return Expr(mark, tuple(terms))  # type: ignore[arg-type]  # mark is one of ExprOp

    def _atom(self) -> Dim:
        if self.accept("("):
            inner = self.dim()
            self.take(")")
            return inner
        if self.kind() == "number":
            value = self.number_value()
            if isinstance(value, float):
                self.at -= 1
                raise self.fail("a whole number")
            return value
        name = self.word("a size")
        if name in ("max", "min") and self.accept("("):
            items = self._until(")", self.dim)
            return Expr(name, tuple(items))  # type: ignore[arg-type]  # max or min
        if name not in self.symbols and name != "seed":
            self.at -= 1
            raise self.fail(f"one of the symbols {self.symbols}")
        return Expr("sym", (name,))

    def _until(self, close: str, item: Any) -> list[Any]:
        items: list[Any] = []
        while not self.accept(close):
            items.append(item())
            if not self.peek(close):
                self.take(",")
        return items

    # arguments
    def argument(self) -> Arg:
        if self.kind() == "string":
            return self.word()
        if self.accept("%"):
            return Ref(self.word())
        if self.accept("["):
            return tuple(self._until("]", self.argument))
        for word, value in (("none", None), ("true", True), ("false", False)):
            if self.accept(word):
                return value
        if self.kind() == "name" and self.peek(":", 1):
            kind = self.word()
            if kind not in _CONSTS:
                raise self.fail(f"one of {_CONSTS}")
            self.take(":")
            return TorchConst(kind, self.word())  # type: ignore[arg-type]  # checked above
        start = self.at
        if self.kind() == "number" and isinstance(number := self.number_value(), float):
            return number
        self.at = start
        return self.dim()

    def output(self) -> Output:
        if self.accept("["):
            return tuple(self._until("]", self._percent_name))
        return None if self.accept("none") else self._percent_name()

    def _percent_name(self) -> str:
        self.take("%")
        return self.word()


def parse_structure(text: str) -> Structure:
    """Read a Program from its text form. Raises ProgramError with line and column."""
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ProgramError("the text of the program is empty")
    program = _head(_Line(lines[0][1], lines[0][0], []))
    for number, line in lines[1:]:
        try:
            _read(_Line(line, number, program.symbols), program)
        except RecursionError:
            raise ProgramError(f"line {number}: expressions or lists are nested too deeply", line=number) from None
    return program


def _read(line: _Line, program: Structure) -> None:
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
    if not line.done():
        raise line.fail("the end of the line")


def _head(line: _Line) -> Structure:
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


def _variable(line: _Line) -> VarDesc:
    name = line.word()
    line.take(":")
    dtype = line.word("a dtype")
    line.take("[")
    fields: dict[str, Any] = {"shape": tuple(line._until("]", line.dim))}
    while not line.done():
        word = line.word("a flag")
        if word in _FLAGS:
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


def _guard(line: _Line) -> Guard:
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


def _operator(line: _Line) -> Operator:
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


def _clauses(line: _Line, fields: dict[str, Any]) -> None:
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


def _block(line: _Line) -> int:
    number = line.number_value() if line.kind() == "number" else 0
    if not isinstance(number, int) or number < 1:
        raise line.fail("the number of a block from 1 on")
    return number


def _role(line: _Line) -> Role:
    role = Role(0)
    while True:
        word = line.word("a role")
        if word not in _ROLES:
            line.at -= 1
            raise line.fail(f"one of {', '.join(str(r) for r in _ROLES)}")
        role |= _ROLES[word]
        if not line.accept("+"):
            return role
