"""Launchers (`launch`: ranks that train collectively, `launch_ps`: parameter servers) and the ranks' own meeting."""
