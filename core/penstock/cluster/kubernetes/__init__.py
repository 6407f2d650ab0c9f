"""Pilots on Kubernetes: a gang is an Indexed Job, whose pods are the pilots.

`manifests` says what is created and `pods` what was found, both pure; `access` finds the API server, `api` speaks to
it, `watching` keeps a copy of what it has, and `engine` is the provisioner.
"""
