"""The dashboard's files. Every path that is no file is a client route and gets index.html.

Files under `assets/` carry a hash in their name and are cached for good; the rest is asked for again.
"""

from __future__ import annotations

import mimetypes
from pathlib import Path

from fastapi import HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse

from penstock_server.auth.principal import unauthenticated
from penstock_server.problems import Problem
from penstock_server.routers.compression import accepts_gzip
from penstock_server.routers.deps import Server
from penstock_server.routers.guarded import guarded_router

router = guarded_router(include_in_schema=False)

_NOT_BUILT = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Penstock</title>
<body><h1>Penstock runs; its dashboard is not built</h1>
<p>In the checkout, run <code>make setup</code> (Node 20 or newer) and load this page again.</p>
<p>The API answers under <code>/api/v1</code>.</p></body></html>"""


def find_static_dir(configured: Path | None) -> Path | None:
    """Return the folder of the built dashboard: configured, packaged, or built in the checkout."""
    here = Path(__file__).resolve()
    candidates = [configured] if configured else [here.parents[1] / "static", here.parents[3] / "web" / "dist"]
    return next((folder.resolve() for folder in candidates if (folder / "index.html").is_file()), None)


@router.api_route("/{path:path}", methods=["GET", "HEAD"])
@unauthenticated
async def get_page(server: Server, request: Request, path: str) -> Response:
    """Return a file of the dashboard, or its index."""
    if request.app.state.methods_of(request.url.path):
        raise HTTPException(405)
    if path == "api" or path.startswith("api/"):
        raise Problem(404, "not_found", f"GET /{path}: there is no such call; /openapi.json lists them all")
    folder = find_static_dir(server.settings.static_dir)
    if folder is None:
        return HTMLResponse(_NOT_BUILT, headers={"Cache-Control": "no-store"})
    file = _file(folder, path)
    if file is None and path.startswith("assets/"):
        raise Problem(404, "not_found", f"GET /{path}: there is no such file")
    forever = file is not None and path.startswith("assets/")
    caching = "public, max-age=31536000, immutable" if forever else "no-cache"
    found = file or folder / "index.html"
    headers = {"Cache-Control": caching, "Vary": "Accept-Encoding"}
    packed = found.with_name(f"{found.name}.gz")  # the build makes it
    if accepts_gzip(request) and packed.is_file():
        kind = mimetypes.guess_type(found.name)[0]
        return FileResponse(packed, media_type=kind, headers={**headers, "Content-Encoding": "gzip"})
    return FileResponse(found, headers=headers)


def _file(folder: Path, path: str) -> Path | None:
    if not path or "\0" in path or "\\" in path:
        return None
    try:
        found = (folder / path).resolve()
        return found if found.is_relative_to(folder) and found.is_file() else None
    except OSError:  # a name that no file can have, such as one of 300 letters
        return None
