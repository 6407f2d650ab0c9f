"""docs/fluid-api.md follows the table of Fluid's names and what Penstock has of them."""

from __future__ import annotations

from tools import fluid_api


def test_the_page_is_what_the_table_and_the_code_give() -> None:
    written = fluid_api.PAGE.read_text(encoding="utf-8")
    assert written == fluid_api.page(), "write it with: python -m tools.fluid_api --write"
