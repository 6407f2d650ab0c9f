"""Benchmarks, run as `python -m bench NAME [--rounds N] [--json]`; one module for each NAME."""
