"""Pilots on other schedulers: agents that Slurm, Ray or Kubernetes runs for as long as jobs wait for them.

`provisioner` is the seam to a scheduler, `scaling` decides without I/O, `keeper` carries out. Penstock adds no
scheduler of its own to a cluster that has one: placement, fencing, logs and views are those of any other node.
"""
