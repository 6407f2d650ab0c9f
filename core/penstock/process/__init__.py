"""Starting and ending processes: of the launchers, the command, the agent and its guards, and pipe commands.

`signals`  turns signals into an exception, holds and ignores them
`proc`     reads /proc and ties a child to its parent; with `signals` all that a guard loads, standard library only
`end`      the end of a process as a descriptor
`group`    a process with all that it starts: start, status, signal, stop
`reaper`   ends what a killed launcher left
`tether`   a command that ends in order with the process that started it
"""
