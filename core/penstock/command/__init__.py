"""The commands of `penstock`, one module a group. Importing them costs typer and nothing else: httpx, pydantic, yaml
and rich are loaded by the command that needs them, so that `--help` and completion answer at once.
"""
