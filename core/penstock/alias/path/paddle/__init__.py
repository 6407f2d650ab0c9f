"""What `import paddle` finds where this folder is in PYTHONPATH, as in scripts of `penstock run-fluid`: the alias.

Tables of servers are whole in a process without any, unless PENSTOCK_LOCAL_TABLES says otherwise: as in Fluid. It is
set here, because scripts start others with nothing of their environment but paths.
"""

import os

from penstock.alias.finder import take_over
from penstock.settings import LOCAL_TABLES

os.environ.setdefault(LOCAL_TABLES.name, "1")
take_over()
