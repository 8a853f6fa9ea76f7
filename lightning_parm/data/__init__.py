"""A stateful, rescalable, streaming token loader: plain PyTorch, no Lightning, no torch.distributed."""

from lightning_parm.data.loader import TokenLoader

__all__ = ["TokenLoader"]
