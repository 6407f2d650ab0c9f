"""One line of a Program's text: its tokens, and the productions that read operands and sizes. See `text.py`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProgramError
from penstock.program.expr import Dim, Expr
from penstock.program.ir import Arg, Output, Ref, SubBlock, TorchConst

_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?(?:inf|nan)\b|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)'
    r"|(?P<name>[A-Za-z_@][A-Za-z0-9_.@/]*)|(?P<mark>->|//|==|!=|<=|>=|[-+*%()\[\]:=,<>]))"
)
_MAX_DIGITS = 400  # of a number; Python itself refuses to read thousands
_CONSTS = ("dtype", "device", "layout", "memory_format")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    column: int


class Line:
    """The tokens of one line, and the productions that read them. Raises ProgramError with line and column.

    `symbols`: names of sizes; `blocks`: that were read, and that no operator has named yet.
    """

    def __init__(self, text: str, number: int, symbols: list[str], blocks: dict[int, SubBlock] | None = None) -> None:
        self.number, self.symbols = number, symbols
        self.blocks = {} if blocks is None else blocks  # that were read, and that no operator has named yet
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
            if kind == "block":
                return self._block()
            if kind not in _CONSTS:
                raise self.fail(f"one of {_CONSTS}")
            self.take(":")
            return TorchConst(kind, self.word())  # type: ignore[arg-type]  # checked above
        start = self.at
        if self.kind() == "number" and isinstance(number := self.number_value(), float):
            return number
        self.at = start
        return self.dim()

    def _block(self) -> SubBlock:
        self.take(":")
        found = self.blocks.pop(int(self.number_value()), None) if self.kind() == "number" else None
        if found is None:
            self.at -= 1
            raise self.fail("the number of a block that stands before, and that no other operator names")
        return found

    def output(self) -> Output:
        if self.accept("["):
            return tuple(self._until("]", self._percent_name))
        return None if self.accept("none") else self._percent_name()

    def _percent_name(self) -> str:
        self.take("%")
        return self.word()
