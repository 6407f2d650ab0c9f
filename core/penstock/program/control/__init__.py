"""Operators that run blocks: `penstock::control` and its gradient."""
