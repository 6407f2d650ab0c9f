"""A hello holds no text that a server refuses: its node would never connect."""

from __future__ import annotations

import json

import pytest

from penstock.machine.findings import Finding
from penstock_server.schemas import wire
from penstock_worker import messages


@pytest.mark.parametrize("text", ["x" * 10_000, "/a/\udcff/b", "a\0b", ""], ids=["long", "no text", "nul", "empty"])
def test_findings_of_any_text_are_taken(text: str) -> None:
    finding = Finding("cache folder", "warning", text, text)
    parsed = wire.parse(wire.AGENT, messages.hello(version="1", boot_id="b", reports=[], findings=[finding] * 100))
    assert isinstance(parsed, wire.AgentHello)
    assert len(parsed.findings) == messages.MOST_FINDINGS


def test_findings_are_sent_with_level_and_advice() -> None:
    found = json.loads(
        messages.hello(version="1", boot_id="b", reports=[], findings=[Finding("clock", "warning", "wrong", "mend it")])
    )
    assert found["findings"] == [{"name": "clock", "level": "warning", "detail": "wrong", "advice": "mend it"}]
