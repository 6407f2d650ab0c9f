"""`import penstock.paddle_alias` makes `import paddle.fluid as fluid`, and every import of Fluid 1.8, mean Penstock.

`penstock run-fluid` does the same for a script that stays as it is. docs/fluid-scripts.md.
"""

from __future__ import annotations

from penstock.alias.finder import install as install

install()
