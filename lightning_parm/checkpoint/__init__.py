"""Checkpoints that all ranks write and any other sizes read.

directory    reads, consolidates and removes sharded checkpoints
save         how every rank's part becomes one directory
background   the same on a thread
folder       a directory on a disk or behind a URL
trainer      what ParmStrategy does when the Trainer saves and loads
fabric       what ``fabric.save`` writes
"""

from lightning_parm.checkpoint.directory import consolidate

__all__ = ["consolidate"]
