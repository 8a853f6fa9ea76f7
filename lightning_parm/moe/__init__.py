"""Mixture-of-Experts layers with model, expert and expert-sharding parallelism: plain PyTorch, no Lightning."""
