"""Grafana's dashboard and Prometheus' rules ask for metrics that the server has, with labels that these have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock_server.instruments import Instruments

DEPLOY = Path(__file__).parents[2] / "deploy"
OF_SCRAPE = {"instance", "job"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
LABELS = {
    "penstock_http_requests": {"method", "route", "status"},
    "penstock_http_request_seconds": {"route", "le"},
    "penstock_frames": {"kind"},
    "penstock_refused": {"reason"},
    "penstock_jobs": {"state"},
    "penstock_nodes": {"state"},
}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana/penstock.json").read_text(encoding="utf-8"))
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/penstock.rules.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [
    *(target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]),
    *(rule["expr"] for rule in rules()),
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_what_the_server_has(expression: str) -> None:
    families = {family.name: SUFFIXES[family.type] for family in Instruments().registry.collect()}
    served = {name + suffix: name for name, suffixes in families.items() for suffix in suffixes}
    asked = set(re.findall(r"\bpenstock_\w+", expression))
    assert asked <= served.keys()
    labels = {label for name in asked for label in LABELS.get(served[name], ())} | OF_SCRAPE
    used = {label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in group.split(",")}
    assert used <= labels
    assert expression.count("(") == expression.count(")")


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 10
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_alerts_have_names_of_their_own_and_say_what_is_wrong() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    assert all(rule["labels"]["severity"] in ("warning", "critical") for rule in rules())
    assert all(rule["annotations"]["summary"] for rule in rules())
