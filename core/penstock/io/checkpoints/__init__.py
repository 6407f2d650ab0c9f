"""Checkpoints: saves that a training makes while it goes on, and goes on from as if nothing had interrupted it.

layout, record, fingerprint                        decide, without I/O
fence, writing, reading                            the files: fencing, commit, removal, and what is whole
server_parts, servers                              what parameter servers write, and take back
writer_thread                                      copies for the writer, and its thread
team, ranks_team, trainers_team                    when, and the processes that take part
preemption                                         the end of a training that an agent asks to save and to end
saving, restoring                                  CheckpointManager
"""
