"""Launchers: `python -m penstock.distributed.launch_ps` starts a job of parameter servers on this host."""
