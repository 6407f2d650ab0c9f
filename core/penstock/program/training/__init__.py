"""What a training adds to a recording: parameters, the backward pass, and what changes gradients and their rate."""
