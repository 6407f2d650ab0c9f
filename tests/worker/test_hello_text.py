"""A hello holds no text that a server refuses: its node would never connect."""

from __future__ import annotations

import json

import pytest

from penstock.errors import UserError
from penstock.machine.findings import Finding
from penstock.protocol.agent import FROM_AGENT, MAX_FINDINGS, Hello
from penstock.protocol.wire import parse
from penstock_worker import messages


@pytest.mark.parametrize("text", ["x" * 10_000, "/a/\udcff/b", "a\0b", ""], ids=["long", "no text", "nul", "empty"])
def test_findings_of_any_text_are_taken(text: str) -> None:
    finding = Finding("cache folder", "warning", text, text)
    parsed = parse(FROM_AGENT, messages.hello(version="1", boot_id="b", reports=[], findings=[finding] * 100).encode())
    assert isinstance(parsed, Hello)
    assert len(parsed.findings) == MAX_FINDINGS


@pytest.mark.parametrize("address", ["x" * 256, "a\0b", "\udcff"], ids=["long", "nul", "no text"])
def test_an_unsendable_address_is_an_error_that_names_it(address: str) -> None:
    with pytest.raises(UserError, match=r"PENSTOCK_NODE_ADDRESS.*address: "):
        messages.hello(version="1", boot_id="b", reports=[], address=address)


def test_findings_are_sent_with_level_and_advice() -> None:
    found = json.loads(
        messages.hello(
            version="1", boot_id="b", reports=[], findings=[Finding("clock", "warning", "wrong", "mend it")]
        ).encode()
    )
    assert found["findings"] == [{"name": "clock", "level": "warning", "detail": "wrong", "advice": "mend it"}]
