"""Operators by Fluid's type: the slots, attributes and defaults of each, and what records it.

`table` has them all. `Block.append_op` and the reader of `__model__` look there, and nowhere else.
"""
