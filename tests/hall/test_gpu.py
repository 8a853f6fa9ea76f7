"""One CUDA device trains the demo's model, resumes it, and agrees with the CPU."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from data.corpora import write_arrow
from distributed import run_ranks
from hall.models import RecordingGPT
from hall.trainers import ForkedEnvironment

from lightning_parm import ParmStrategy, TokenDataModule

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
STEPS = 10


class FusedGPT(RecordingGPT):
    """With the optimizer that one would take on a GPU."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["fused"] = True
        return configured


def train(
    rank: int, world_size: int, accelerator: str, folder: Path, steps: int, resume_from: str | None, data_parallel: str
) -> list[float]:
    """Losses of the demo's model in float32, up to ``steps``; it leaves ``<steps>.ckpt`` behind."""
    dist.destroy_process_group()  # the strategy is to start its own, with the device's backend
    torch.set_float32_matmul_precision("highest")
    options = yaml.safe_load(DEMO.read_text(encoding="utf-8"))["model"]["init_args"]
    L.seed_everything(5, verbose=False)
    model = FusedGPT(**options)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=ParmStrategy(data_parallel=data_parallel),
        plugins=[ForkedEnvironment(rank, world_size)],
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TokenDataModule(str(folder / "tokens.arrow"), sequence_length=64, batch_size=2, num_logical_shards=8)
    trainer.fit(model, data, ckpt_path=resume_from)
    trainer.save_checkpoint(folder / f"{accelerator}-{steps}.ckpt")
    assert next(model.parameters()).device.type == "cpu", "the device is given back after a fit"
    return model.losses


def compare(folder: Path, accelerator: str) -> None:
    random = np.random.default_rng(2)
    documents = [random.integers(0, 256, length).astype(np.uint16) for length in random.integers(20, 200, 60)]
    write_arrow(folder / "tokens.arrow", documents)
    (expected,) = run_ranks(1, train, "cpu", folder, STEPS, None, "replicate", timeout=300.0)
    assert expected[-1] < expected[0], "it must learn"
    for data_parallel in ("replicate", "shard"):
        half, rest = STEPS // 2, str(folder / f"{accelerator}-{STEPS // 2}.ckpt")
        (losses,) = run_ranks(1, train, accelerator, folder, half, None, data_parallel, timeout=300.0)
        (resumed,) = run_ranks(1, train, accelerator, folder, STEPS, rest, data_parallel, timeout=300.0)
        torch.testing.assert_close(losses + resumed, expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
def test_one_gpu_trains_and_resumes_the_demo_as_the_cpu_does(tmp_path: Path) -> None:
    compare(tmp_path, "cuda")  # the ranks are forked before anything has touched the device


@pytest.mark.gpu
def test_float16_scales_its_losses_on_one_gpu() -> None:
    def rank_main(rank: int, world_size: int) -> tuple[list[float], float]:
        dist.destroy_process_group()
        model = FusedGPT(vocab_size=64, num_layers=2, num_heads=2, model_dim=32, hidden_dim=64, num_experts=4)
        trainer = L.Trainer(
            accelerator="cuda",
            devices=1,
            strategy=ParmStrategy(),
            plugins=[ForkedEnvironment(rank, world_size)],
            precision="16-mixed",
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        tokens = torch.arange(65).remainder(64).repeat(16, 1)
        samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]
        trainer.fit(model, torch.utils.data.DataLoader(samples, batch_size=4, pin_memory=True))
        return model.losses, trainer.precision_plugin.scaler.get_scale()

    ((losses, scale),) = run_ranks(1, rank_main)
    assert all(np.isfinite(losses))
    assert scale > 0
