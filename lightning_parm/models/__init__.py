"""A small GPT with MoE blocks."""
