"""The node agent: it dials the server, runs the replicas that the server wants here, and relays what they send.

`messages`   JSON messages of the agent's websocket
`reconcile`  desired x observed -> instructions, without I/O
`outgoing`   what goes over the websocket next, without I/O
`buffer`     bounded buffer of telemetry frames, without I/O
`guard`      the small process above each replica (standard library only)
`replica`    one replica: its folder, its guard, its log and its telemetry socket
`agent`      the shell: websocket, tasks, signals

Imports `penstock.{errors,ids,protocol,client}`, never the server, never torch.
"""
