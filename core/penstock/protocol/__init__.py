"""What server, worker, trainer and browser share: plain data, no torch, no fastapi, no I/O.

`jobspec`    the job description (one pydantic model: OpenAPI, CLI and TypeScript types come from it)
`states`     states of job, replica and node, and their transition tables
`contract`   the environment that an agent gives to a process
`frames`     the telemetry codec (columnar, little-endian)
`exchange`   EXCHANGE frames of trainers and parameter servers, and their sum as a matrix
`graphdoc`   the graph document that a browser draws
"""
