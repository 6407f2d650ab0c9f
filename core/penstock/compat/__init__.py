"""Private and unstable names of other libraries, one module for each library; `tools/private_names.py` holds it.

Invariant: a module here is a leaf that imports its library alone, each of its names states its reason, and
`tests/compat` has one contract test for each name, which fails with that name when a new version changes it.
"""
