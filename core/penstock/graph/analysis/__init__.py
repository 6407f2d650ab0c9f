"""What is read off a graph without changing it: readers of variables, liveness, the buffer plan."""
