"""Bodies of answers, compressed where the client takes that.

The framework's middleware compresses on the event loop, as large as a body may be; ours does it in a thread, only for
what is worth it, and never for answers that hold a secret.
"""

from __future__ import annotations

import asyncio
import gzip

from fastapi import Request, Response

MIN_BYTES = 1024
LEVEL = 1
"""Of a graph document 1 gives 17 times less in a third of the time that 6 takes for 21 times less."""


async def compressed(request: Request, content: bytes, *, media_type: str, headers: dict[str, str]) -> Response:
    """Return a response with `content`, gzipped if the request accepts it and the body is not tiny."""
    varied = {**headers, "Vary": "Accept-Encoding"}
    if len(content) < MIN_BYTES or not accepts_gzip(request):
        return Response(content, media_type=media_type, headers=varied)
    packed = await asyncio.to_thread(gzip.compress, content, LEVEL, mtime=0)
    return Response(packed, media_type=media_type, headers={**varied, "Content-Encoding": "gzip"})


def accepts_gzip(request: Request) -> bool:
    """Whether a request names gzip, other than to refuse it."""
    named = [part.replace(" ", "").lower() for part in request.headers.get("accept-encoding", "").split(",")]
    return any(part == "gzip" or (part.startswith("gzip;") and not part.endswith("q=0")) for part in named)
