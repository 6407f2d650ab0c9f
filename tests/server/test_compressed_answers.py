"""Graphs, frames and the dashboard's files travel compressed to clients that take it, and only to them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tests.server.graph_sample import sample_graph
from tests.server.harness import Server

from penstock.protocol.frames import MAX_FRAME_BYTES, Kind
from penstock.protocol.graphdoc import GraphDocument, canonical, graph_hash

pytestmark = pytest.mark.asyncio


def _large(num_ops: int) -> GraphDocument:
    sample = sample_graph()
    ops = [op.model_copy(update={"name": f"{op.name}_{i}"}) for i in range(num_ops) for op in sample.ops[:1]]
    return sample.model_copy(update={"ops": ops, "edges": [(i, i + 1) for i in range(num_ops - 1)], "syncs": []})


async def test_a_graph_of_twenty_thousand_operators_is_served(sqlite_server: Server) -> None:
    document = _large(20_000)
    text = canonical(document)
    assert len(text) > MAX_FRAME_BYTES
    path = f"/api/v1/graphs/{graph_hash(document)}"
    async with sqlite_server.attached() as trainer, sqlite_server.browser() as browser:
        await browser.subscribe(1, topic="job", job_id=trainer.registered["job_id"])
        await trainer.frame(Kind.GRAPH, body=document.model_dump(mode="json"))
        await trainer.frame(Kind.GRAPH_USED, body={"hash": graph_hash(document)})
        await browser.of("graph")
        packed = await sqlite_server.http.get(path, headers={"Accept-Encoding": "gzip"})
        plain = await sqlite_server.http.get(path, headers={"Accept-Encoding": "gzip;q=0, identity"})
    assert packed.headers["content-encoding"] == "gzip" and packed.headers["vary"] == "Accept-Encoding"
    assert int(packed.headers["content-length"]) < len(text) // 10
    assert "content-encoding" not in plain.headers
    assert packed.content == plain.content == text


async def test_a_file_of_the_dashboard_is_sent_as_the_build_packed_it(sqlite_server: Server, tmp_path: Path) -> None:
    script = b"export {};" * 500
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<p>page</p>")
    (tmp_path / "assets" / "app-1a2b.js").write_bytes(script)
    (tmp_path / "assets" / "app-1a2b.js.gz").write_bytes(gzip.compress(script))
    sqlite_server.runtime.settings.static_dir = tmp_path
    packed = await sqlite_server.http.get("/assets/app-1a2b.js", headers={"Accept-Encoding": "br, gzip"})
    plain = await sqlite_server.http.get("/assets/app-1a2b.js", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip" and "javascript" in packed.headers["content-type"]
    assert int(packed.headers["content-length"]) < len(script) // 10
    assert "content-encoding" not in plain.headers and packed.content == plain.content == script
