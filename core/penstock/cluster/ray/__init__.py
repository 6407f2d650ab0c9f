"""Pilots on Ray: a gang is a placement group and an actor that keeps it, a pilot a detached actor in a bundle of it.

`engine`  the provisioner, which talks to Ray from a node of the cluster
`actors`  what runs in Ray's workers: standard library and Ray only, since Penstock need not be importable there
`states`  the pilots of a gang, from Ray's tables; pure
"""
