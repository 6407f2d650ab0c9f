"""Parameter servers: what is decided (rounds, membership, merging) without I/O, and thin shells around it."""
