"""The SSA graph: a Program on every replica, with gradient exchange, and proofs about it.

ssa.py        versions, operator handles, edges        build.py     Program -> Graph, devices.py over devices
across.py     exchange with other processes            check.py     acyclic, ordered, every read reached
interpret.py  runs a Graph in order: the oracle        document.py  Graph -> what a browser draws, graphviz.py as dot
rewrite.py    from a Graph to the next one             choice.py    which passes run
analysis/     changes nothing: liveness, readers       passes/      Graph -> Graph
"""
