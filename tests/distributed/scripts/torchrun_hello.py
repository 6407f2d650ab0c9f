"""A script for torchrun that knows nothing of Penstock: every rank adds its number to a sum."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print(f"hello from rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {total.item():g}")
dist.destroy_process_group()
