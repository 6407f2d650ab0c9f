"""What the machine under a process can do: probed, never assumed. Standard library only."""
