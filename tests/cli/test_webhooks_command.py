"""`penstock webhooks` against a real server."""

from __future__ import annotations

from typing import Any

from tests.cli.conftest import Site


def test_webhook_is_added_tested_listed_and_removed(serving: Site, until: Any) -> None:
    refused = serving.run("webhooks", "add", "http://127.0.0.1:9/")
    assert refused.returncode == 5
    assert "PENSTOCK_SERVER_WEBHOOK_ALLOW" in refused.stderr
    made = serving.json("webhooks", "add", "http://localhost:9/", "--event", "FAILED", "--project", "lab")
    assert made["secret"].startswith("whsec_")
    queued = serving.json("webhooks", "test", made["id"])
    assert queued["type"] == "test"
    until(lambda: serving.json("webhooks", "list")[0]["failures"] >= 1, "a failed attempt")
    shown = serving.run("webhooks", "list").stdout
    assert "enabled" in shown and "is not public" in shown and made["secret"] not in shown
    [delivery] = serving.json("webhooks", "deliveries", made["id"])
    assert (delivery["id"], delivery["delivered_at"]) == (queued["id"], None)
    assert delivery["attempts"] >= 1  # the next follows some seconds after the first
    assert serving.json("webhooks", "enable", made["id"])["next_at"] is None
    assert serving.run("webhooks", "remove", made["id"]).stdout.strip() == made["id"]
    assert serving.json("webhooks", "list") == []
    assert serving.run("webhooks", "test", made["id"]).returncode == 3
