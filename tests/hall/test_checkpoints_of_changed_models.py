"""A checkpoint loaded into a model that differs from the one that was saved, and what is said about it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hall.continued import TOPOLOGIES, corpus, data, run, train
from hall.models import RecordingGPT, small_gpt
from hall.trainers import make_trainer

from lightning_parm import ParmStrategy

EP2 = {"expert_parallel_size": 2}


class Renamed(RecordingGPT):
    """The last norm has another name."""

    def __init__(self, strict_loading: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.final_norm = self._modules.pop("norm")
        self.strict_loading = strict_loading

    @property
    def norm(self) -> torch.nn.Module:
        return self.final_norm


class Compiled(RecordingGPT):
    """Blocks are wrapped, which puts ``_orig_mod.`` into names; the stance in the tests keeps them from compiling."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for index, block in enumerate(self.blocks):
            self.blocks[index] = torch.compile(block, backend="eager")


class TwoOptimizers(RecordingGPT):
    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        halves = list(self.parameters())
        return [torch.optim.Adam(halves[:3]), torch.optim.Adam(halves[3:])]


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return run("one process", 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved") / "step=3.ckpt")
    run("ep2 esp2", 3, path)
    return path


def test_every_expert_is_in_its_place(saved: str) -> None:
    sizes = [sizes for world_size, sizes in TOPOLOGIES.values() if world_size == 4]

    def rank_main(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
        states = []
        for each in sizes:
            trainer = make_trainer(rank, world_size, ParmStrategy(**each), max_steps=3, max_epochs=-1)
            model = small_gpt(torch.float64)
            trainer.fit(model, data(world_size // each.get("tensor_parallel_size", 1)), ckpt_path=saved)
            states.append(trainer.strategy.whole_state_dict())
        return states

    first, *others = run_ranks(4, rank_main)[0]
    experts = {name: value for name, value in first.items() if ".experts." in name}
    assert len(experts) == 4
    for value in experts.values():
        assert len(value) == 4
        assert all(not torch.equal(value[i], value[j]) for i in range(4) for j in range(i))
    for state in others:
        torch.testing.assert_close(state, first, rtol=0, atol=0)


def test_names_of_compiled_modules_load_either_way(tmp_path: Path, uninterrupted: list[float]) -> None:
    corpus()

    def rank_main(rank: int, world_size: int, sharded: bool, first: type, then: type) -> list[float]:
        torch.compiler.set_stance("force_eager")
        path = str(tmp_path / f"{sharded}-{first.__name__}.ckpt")
        strategy = {"save_distributed_checkpoint": sharded}
        losses = train(rank, world_size, EP2, 3, path, model=small_gpt(torch.float64, cls=first), strategy=strategy)
        return losses + train(rank, world_size, EP2, 5, None, path, model=small_gpt(torch.float64, cls=then))

    def both(rank: int, world_size: int) -> list[list[float]]:
        pairs = ((Compiled, RecordingGPT), (RecordingGPT, Compiled))
        return [rank_main(rank, world_size, sharded, *pair) for sharded in (True, False) for pair in pairs]

    for losses in run_ranks(2, both)[0]:
        torch.testing.assert_close(losses, uninterrupted, rtol=0, atol=1e-9)


def test_renamed_parameters_are_told(saved: str) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> None:
        with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\).*"final_norm.weight".*Unexpected.*"norm.weight"'):
            train(rank, world_size, EP2, 4, None, saved, model=small_gpt(torch.float64, cls=Renamed))
        with pytest.raises(RuntimeError, match=r"size mismatch for embedding\.weight"):
            train(rank, world_size, EP2, 4, None, saved, model=small_gpt(torch.float64, vocab_size=64))
        loose = small_gpt(torch.float64, cls=Renamed, strict_loading=False)
        if rank == 0:
            with pytest.warns(UserWarning, match=r"no optimizer state for 1 of \d+ .*: final_norm\.weight\. Were they"):
                train(rank, world_size, EP2, 4, None, saved, model=loose)
        else:
            train(rank, world_size, EP2, 4, None, saved, model=loose)

    run_ranks(2, rank_main)


def test_other_optimizers_are_told(saved: str) -> None:
    corpus()

    def rank_main(rank: int, world_size: int) -> None:
        model = small_gpt(torch.float64, cls=TwoOptimizers)
        model.automatic_optimization = False
        with pytest.raises(RuntimeError, match=r"holds the states of 1 optimizer\(s\) and configure_optimizers gave 2"):
            train(rank, world_size, EP2, 4, None, saved, model=model, gradient_clip_val=None)

    run_ranks(2, rank_main)
