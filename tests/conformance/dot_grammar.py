"""A reader of the dot language, enough to say whether a file is one: strings are quoted, braces and brackets close.

graph     : "digraph" ID "{" statement* "}"
statement : "subgraph" ID "{" statement* "}" | ID "=" ID ";" | ID ("->" ID)? attributes? ";"
attributes: "[" ID "=" ID ("," ID "=" ID)* "]"
Source: the grammar on graphviz.org, without ports, undirected edges, HTML strings and comments. Imported by tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r'\s*(?:("(?:[^"\\\n]|\\.)*")|(->)|([{}\[\];,=])|([A-Za-z_][A-Za-z_0-9]*))')


@dataclass
class Drawing:
    """What a file says: attributes by node, edges with theirs, frames with the nodes in them."""

    title: str
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    edges: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    frames: dict[str, list[str]] = field(default_factory=dict)


def read_dot(text: str) -> Drawing:
    """Return the drawing. Raises ValueError with the place where the text is no dot."""
    return _Reader(text).graph()


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        position = 0
        while text[position:].strip():
            found = _TOKEN.match(text, position)
            if found is None:
                raise ValueError(f"no token at {text[position : position + 40]!r}")
            self.tokens.append(found.group().strip())
            position = found.end()
        self.next = 0

    def take(self, expected: str = "") -> str:
        token = self.tokens[self.next] if self.next < len(self.tokens) else "the end"
        if (expected and token != expected) or (not expected and not re.match(r'["A-Za-z_]', token)):
            raise ValueError(f"{token!r} where {expected or 'a name'!r} was expected, token {self.next}")
        self.next += 1
        return re.sub(r"\\(.)", r"\1", token[1:-1]) if token.startswith('"') else token

    def sees(self, token: str) -> bool:
        return self.next < len(self.tokens) and self.tokens[self.next] == token

    def graph(self) -> Drawing:
        self.take("digraph")
        drawing = Drawing(self.take())
        self.block(drawing, [])
        if self.next != len(self.tokens):
            raise ValueError(f"{self.tokens[self.next]!r} after the end of the graph")
        return drawing

    def block(self, drawing: Drawing, inside: list[str]) -> None:
        self.take("{")
        while not self.sees("}"):
            self.statement(drawing, inside)
        self.take("}")

    def statement(self, drawing: Drawing, inside: list[str]) -> None:
        if self.sees("subgraph"):
            self.take("subgraph")
            return self.block(drawing, drawing.frames.setdefault(self.take(), []))
        name = self.take()
        if self.sees("="):
            self.take("=")
            self.take()
        elif self.sees("->"):
            self.take("->")
            drawing.edges.append((name, self.take(), self.attributes()))
        elif name in ("graph", "node", "edge"):
            self.attributes()
        else:
            drawing.nodes[name] = self.attributes()
            inside.append(name)
        self.take(";")

    def attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if not self.sees("["):
            return found
        self.take("[")
        while not self.sees("]"):
            key = self.take()
            self.take("=")
            found[key] = self.take()
            if not self.sees("]"):
                self.take(",")
        self.take("]")
        return found
