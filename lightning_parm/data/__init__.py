"""A stateful, rescalable, streaming token loader: plain PyTorch, no Lightning, no torch.distributed.

.. code-block:: text

    files -> documents -> logical shards -> windows -> samples -> batches
    sources    index        shards.py      windows.py  mixture.py   blocks.py
                                                       order.py     batches.py

What sample ``i`` is follows from the sources, the seed, the sequence length, the number of logical shards and the mix;
a run's position is the number of samples consumed. Ranks, workers and batch sizes only say who reads which samples.
"""

from lightning_parm.data.batches import BatchMaker
from lightning_parm.data.elastic import ElasticSampler
from lightning_parm.data.evaluation import EvaluationLoader
from lightning_parm.data.loader import TokenLoader
from lightning_parm.data.sources.format import BadFile, FileIndex, Format, map_tokens
from lightning_parm.data.sources.registry import open_sources

__all__ = [
    "BadFile",
    "BatchMaker",
    "ElasticSampler",
    "EvaluationLoader",
    "FileIndex",
    "Format",
    "TokenLoader",
    "map_tokens",
    "open_sources",
]
