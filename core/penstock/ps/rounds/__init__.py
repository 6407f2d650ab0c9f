"""One state machine a training mode: events in, instructions out, no I/O, no threads, no clock."""
