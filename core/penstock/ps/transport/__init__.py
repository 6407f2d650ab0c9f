"""How messages travel: between processes of one host by a Unix socket and shared memory, else by gRPC.

Both carry the same messages, check the job's token before anything else, and bound every call by a deadline.
"""
