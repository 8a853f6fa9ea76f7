"""Mixture-of-Experts training and a stateful token loader for PyTorch Lightning.

.. code-block:: python

    import lightning as L
    import lightning_parm  # registers the strategy "parm"
    from lightning_parm.models import GPT

    data = lightning_parm.TokenDataModule("data/*.arrow", sequence_length=1024, batch_size=8)
    model = GPT(vocab_size=50257, num_experts=8)
    keep = L.pytorch.callbacks.ModelCheckpoint("checkpoints", every_n_train_steps=500, save_last=True)
    trainer = L.Trainer(strategy="parm", devices=8, max_steps=10_000, callbacks=keep)
    trainer.fit(model, data, ckpt_path="last")  # kill it, and start it again on any number of devices

The package has two wings that work alone, :mod:`lightning_parm.moe` and :mod:`lightning_parm.data`, and a hall where
they meet Lightning: :class:`ParmStrategy` and :class:`TokenDataModule`.
"""

from lightning_parm.datamodule import TokenDataModule
from lightning_parm.elastic import ElasticDataModule
from lightning_parm.metrics import ExpertLoad
from lightning_parm.moe import MoE, Topology
from lightning_parm.registration import register
from lightning_parm.strategy import ParmStrategy

__version__ = "0.1.0"
__all__ = ["ElasticDataModule", "ExpertLoad", "MoE", "ParmStrategy", "TokenDataModule", "Topology"]

register()
