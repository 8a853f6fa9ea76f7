"""A project that runs on ``ddp`` runs on ``parm`` with the string changed, and the diffs of docs/upgrade.md run."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.corpora import write_arrow
from distributed import run_command, run_ranks
from hall.models import RecordingGPT, small_gpt
from hall.trainers import OrderedTokens, RandomTokens, make_trainer
from test_documentation import PRELUDE
from torch import Tensor, nn
from torch.utils.data import DataLoader

PAGE = Path(__file__).parents[2] / "docs" / "upgrade.md"


class Dense(RecordingGPT):
    """A project's model: no mixture, a buffer, and a batch norm behind a frozen layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.frozen, self.batch_norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, input_ids: Tensor, *_: Any) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.scale * self.batch_norm(self.frozen(x).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x, torch.arange(x.shape[1]), None)
        return self.head(self.norm(x))


def fit(
    rank: int, world_size: int, strategy: str, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], float]:
    model = small_gpt(cls=Dense, num_experts=0)
    trainer = make_trainer(rank, world_size, strategy, max_steps=6, max_epochs=-1, **options)
    trainer.fit(model, OrderedTokens(48, 8))
    (validated,) = trainer.validate(model, DataLoader(RandomTokens(8), batch_size=4), verbose=False)
    return model.losses, {name: value.detach() for name, value in model.state_dict().items()}, validated["val_loss"]


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}]
)
def test_two_ranks_compute_what_ddp_computes_bit_by_bit(options: dict[str, Any]) -> None:
    for (losses, state, val_loss), (ours, our_state, our_val_loss) in zip(
        run_ranks(2, fit, "ddp", options), run_ranks(2, fit, "parm", options), strict=True
    ):
        assert ours == losses
        assert our_val_loss == val_loss
        # ddp leaves other statistics on other ranks until they evaluate; after that all have the first rank's
        torch.testing.assert_close(our_state, state, rtol=0, atol=0)


@pytest.mark.parametrize(("world_size", "options"), [(2, {"gradient_clip_val": 0.5}), (4, {})])
def test_clipping_and_more_ranks_are_the_same_to_rounding(world_size: int, options: dict[str, Any]) -> None:
    losses, *_ = run_ranks(world_size, fit, "ddp", options)[0]
    ours, *_ = run_ranks(world_size, fit, "parm", options)[0]
    torch.testing.assert_close(ours, losses, rtol=0, atol=1e-6)


def sides(diff: str) -> tuple[str, str]:
    """The old and the new text of a diff without a header."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != other) + "\n" for other in "+-")


def test_every_diff_of_the_page_runs(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for source in ("code", "prose"):
        documents = [random.integers(0, 300, 400).astype(np.uint16) for _ in range(30)]
        write_arrow(tmp_path / "corpus" / source / "0.arrow", documents)
    ddp, mixture, model_parallel, fabric, fms = re.findall(
        r"^```diff\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    old, new = sides(mixture)
    with_mixture = sides(ddp)[1].replace(old, new)
    assert "MoE(" in with_mixture
    runs = [*sides(ddp), with_mixture, *sides(model_parallel), *sides(fabric), sides(fms)[1]]
    script = PRELUDE + "losses = []\n"
    for code in runs:
        script += f"space = {{'__name__': '__main__'}}\nexec({code!r}, space)\n"
        script += "trainer = space.get('trainer')\n"
        script += "loss = trainer.callback_metrics['train_loss'] if trainer else space['loss'].detach()\n"
        script += "losses.append(float(loss))\n"
    # A file for each rank: ranks share one pipe, where what they print can mix.
    script += "import json, os\n"
    script += "with open('losses' + os.environ['LOCAL_RANK'] + '.json', 'w') as file:\n"
    script += "    json.dump(losses, file)\n"
    (tmp_path / "page.py").write_text(script, encoding="utf-8")
    result = run_command([sys.executable, "page.py"], cwd=tmp_path, fresh=False)
    assert result.returncode == 0, result.stderr[-4000:]
    for rank in range(2):
        losses = json.loads((tmp_path / f"losses{rank}.json").read_text())
        assert losses[0] == losses[1], "ddp and parm, bit by bit"
        assert losses[2] != losses[1]
        assert losses[3] == pytest.approx(losses[4], abs=1e-6)
        assert losses[5] == pytest.approx(losses[6], abs=1e-6)
        assert len(losses) == 8
    for name in ("classifier.ckpt", "model.ckpt"):
        assert (tmp_path / name).is_dir(), "parm's checkpoint has taken the place of ddp's file"
