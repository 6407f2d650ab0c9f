"""Programs with parameter servers as they run: a server's blocks, storage and service; a trainer's servers."""
