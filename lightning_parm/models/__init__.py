"""A small GPT with MoE blocks, for examples, benchmarks, and as a pattern for models of one's own."""

from lightning_parm.models.gpt import GPT

__all__ = ["GPT"]
