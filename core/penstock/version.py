"""The version of all of Penstock: library, server and agent."""

__version__ = "0.1.0"
