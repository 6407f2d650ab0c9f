"""Print the server's OpenAPI schema; nothing is started and nothing is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock_server.app import create_app
from penstock_server.settings import Settings

with TemporaryDirectory() as folder:
    schema = create_app(Settings(state_dir=Path(folder))).openapi()
json.dump(schema, sys.stdout)
