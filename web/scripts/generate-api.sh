#!/bin/sh
# Write src/api.d.ts from the server's OpenAPI: PYTHON=../.venv/bin/python npm run api
# The generator needs TypeScript 5's API, so it and its compiler are fetched for this call and are no dependency.
set -eu
cd "$(dirname "$0")/.."
schema=$(mktemp)
trap 'rm -f "$schema"' EXIT
"${PYTHON:-../.venv/bin/python}" scripts/dump_openapi.py > "$schema"
npx --yes --package typescript@5.9.3 --package openapi-typescript@7.13.0 -- \
  openapi-typescript "$schema" --immutable --alphabetize --output src/api.d.ts
