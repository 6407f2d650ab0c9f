"""The SSA graph: a Program on every replica, with gradient exchange, and proofs about it.

ssa.py        versions, operator handles, edges        build.py     Program -> Graph
placement.py  which replica updates which parameter    check.py     acyclic, ordered, every read reached
interpret.py  runs a Graph in order: the oracle        document.py  Graph -> what a browser draws
"""
