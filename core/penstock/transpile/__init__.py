"""From one Program to the Programs of trainers and parameter servers. Pure: Programs in, Programs out."""
