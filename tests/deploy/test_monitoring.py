"""Grafana's dashboard and Prometheus' rules ask for metrics that the server has, with labels that these have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.server.harness import running, settings_for

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


def exported(text: str) -> dict[str, set[str]]:
    """Return the names of samples that an answer of /metrics announces, with the labels of those that it has."""
    found: dict[str, set[str]] = {}
    for family, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        names = [family + suffix for suffix in ("_bucket", "_sum", "_count")] if kind == "histogram" else [family]
        found.update((name, set()) for name in names)
    for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.mark.asyncio
async def test_a_running_server_exports_what_is_asked_for(tmp_path: Path) -> None:
    async with running(settings_for(tmp_path)) as server:
        await server.submit()
        served = exported((await server.http.get("/metrics")).text)
    asked = {name for expression in EXPRESSIONS for name in re.findall(r"\bpenstock_\w+", expression)}
    assert asked - served.keys() == set()
    assert {"penstock_jobs", "penstock_http_requests_total"} <= asked
    for name, labels in (("penstock_jobs", {"state"}), ("penstock_http_requests_total", {"method", "route", "status"})):
        assert served[name] == labels, "a family whose labels stand in LABELS"


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    found = dashboard()
    assert (found["uid"], bool(found["title"]), found["schemaVersion"]) == ("penstock", True, 39)
    [variable] = found["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    for panel in found["panels"]:
        where = panel["title"]
        assert where, panel["id"]
        assert panel["type"] == "timeseries", where
        assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{variable['name']}}}"}, where
        refs = [target["refId"] for target in panel["targets"]]
        assert refs, where
        assert len(refs) == len(set(refs)), where
        named = re.findall(r"\{\{(\w+)\}\}", " ".join(target["legendFormat"] for target in panel["targets"]))
        asked = " ".join(target["expr"] for target in panel["targets"])
        assert all(re.search(rf"\bby \([^)]*\b{label}\b", asked) for label in named), where


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
