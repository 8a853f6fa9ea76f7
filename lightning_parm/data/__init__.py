"""A stateful, rescalable, streaming token loader: plain PyTorch, no Lightning, no torch.distributed."""
