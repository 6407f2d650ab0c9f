"""What the machine under a process can do: probed, never assumed. Standard library only.

Importing the package registers every probe, and runs none.
"""

from penstock.machine import cache, cgroup, cores, network, process_end, shared

__all__ = ["cache", "cgroup", "cores", "network", "process_end", "shared"]
