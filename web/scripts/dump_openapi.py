"""Print the schemas that `src/api.d.ts` comes from: the server's OpenAPI, and what goes over the browser's websocket.

Nothing is started and nothing is written. `penstock.protocol.stream` holds the second part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.protocol import stream
from penstock_server.app import create_app
from penstock_server.settings import Settings

with TemporaryDirectory() as folder:
    schema = create_app(Settings(state_dir=Path(folder))).openapi()
schema["components"]["schemas"].update(stream.schemas("#/components/schemas/{model}"))
schema["info"].pop("version")  # not of the protocol
del schema["components"]["schemas"]["JobSpec"]["anyOf"]  # conditions between fields, of which TypeScript makes a union
json.dump(schema, sys.stdout, sort_keys=True)
