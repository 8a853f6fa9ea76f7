"""Mixture-of-Experts layers with model, expert and expert-sharding parallelism: plain PyTorch, no Lightning."""

from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

__all__ = ["MoE", "Topology"]
