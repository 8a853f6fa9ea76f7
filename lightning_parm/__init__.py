"""Mixture-of-Experts training and a stateful token loader for PyTorch Lightning."""

__version__ = "0.1.0"
