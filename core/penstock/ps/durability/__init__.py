"""Durability of a parameter server: write-ahead log, snapshots, recovery."""
