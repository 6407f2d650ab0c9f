"""fleet: one script for all processes of a job with parameter servers. The object itself is in `parameter_server`.

`position`, `roles` and `order` are pure, and need neither torch nor an executor. Fluid's paths are in
`penstock.incubate`.
"""
