"""Registration of Penstock's operators that exchange tensors between processes, or run blocks.

Imported with the first public name of a program: a program that was saved may call them, and is read, extended and
checked where nothing else of servers or ranks is imported. Opens no connection and loads no gRPC.
"""

from __future__ import annotations

from penstock.distributed import collective as _collective_ops  # noqa: F401 - exchanges of ranks
from penstock.program.control import kernel as _control  # noqa: F401 - blocks
from penstock.ps import remote_ops as _remote_ops  # noqa: F401 - calls of parameter servers
