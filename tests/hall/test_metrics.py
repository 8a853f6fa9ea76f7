"""ExpertLoad: right numbers from counts, over batches, over ranks, and under model parallelism."""

from __future__ import annotations

import builtins
from typing import Any

import matplotlib
import pytest
import torch
from distributed import run_ranks
from torch import Tensor

from lightning_parm import ExpertLoad, MoE, Topology


def test_statistics_of_known_counts() -> None:
    metric = ExpertLoad(num_layers=3, num_experts=4)
    metric.update(torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 8], [1, 2, 3, 2]]))
    metric.update(torch.tensor([[1.0, 1, 1, 1], [4, 0, 0, 0], [1, 2, 3, 2]]))
    load = metric.compute()
    torch.testing.assert_close(
        load["utilisation"], torch.tensor([[1, 1, 1, 1], [4 / 3, 0, 0, 8 / 3], [0.5, 1, 1.5, 1]])
    )
    assert load["load_max_over_mean"].tolist() == pytest.approx([1, 8 / 3, 1.5])
    assert load["maxvio"].tolist() == pytest.approx([0, 5 / 3, 0.5])
    assert load["dead_experts"].tolist() == [0, 2, 0]
    metric.reset()
    assert metric.counts.sum() == 0


def test_layers_may_differ_in_size() -> None:
    metric = ExpertLoad(num_layers=2, num_experts=[2, 4])
    metric.update([torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0, 2.0, 0.0])])
    load = metric.compute()
    assert load["load_max_over_mean"].tolist() == pytest.approx([1.5, 4 / 3])
    assert load["dead_experts"].tolist() == [0, 1]
    assert load["utilisation"].isnan().tolist() == [[False, False, True, True], [False] * 4]


def test_without_a_token_nothing_divides_by_zero() -> None:
    metric = ExpertLoad(num_layers=1, num_experts=3)
    metric.update(torch.zeros(1, 3))
    load = metric.compute()
    assert load["utilisation"].tolist() == [[0, 0, 0]]
    assert load["dead_experts"].tolist() == 3, "torchmetrics takes the only dim away where a result has one element"


def test_many_tokens_are_counted_exactly() -> None:
    metric = ExpertLoad(num_layers=1, num_experts=2)
    metric.update(torch.tensor([[2.0**24, 0.0]]))
    for _ in range(3):
        metric.update(torch.tensor([[1.0, 0.0]]))
    assert metric.counts[0, 0].item() == 2**24 + 3, "float32 would stand still at 2^24"


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match=r"num_layers=2 and num_experts=\[4\] do not fit"):
        ExpertLoad(num_layers=2, num_experts=[4])
    with pytest.raises(ValueError, match="num_layers=0 and num_experts=4 do not fit"):
        ExpertLoad(num_layers=0, num_experts=4)
    metric = ExpertLoad(num_layers=2, num_experts=4)
    with pytest.raises(ValueError, match=r"shapes \[\(3,\), \(3,\)\], and the layers of this ExpertLoad have \[4, 4\]"):
        metric.update(torch.zeros(2, 3))


def test_plot_returns_figure_and_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    metric = ExpertLoad(num_layers=2, num_experts=4)
    metric.update(torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 8]]))
    figure, ax = metric.plot()
    assert ax.get_figure() is figure
    shown = ax.images[0].get_array()
    assert shown.tolist() == metric.compute()["utilisation"].tolist()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("expert", "MoE layer")
    mine, axes = plt.subplots(1, 2)
    assert metric.plot(metric.compute(), ax=axes[1]) == (mine, axes[1])
    plt.close("all")

    found = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-parm\[plot\]'"):
        metric.plot()


def loads(rank: int, world_size: int, sizes: list[tuple[int, int, int]]) -> list[tuple[Tensor, Tensor]]:
    """Counts that ExpertLoad sums over the ranks, and those of one process with all the tokens."""
    results = []
    for tensor_parallel_size, expert_parallel_size, expert_shard_size in sizes:
        for schedule in ("plain", "s1"):
            topology = Topology(world_size, rank, tensor_parallel_size, expert_parallel_size, expert_shard_size)
            torch.manual_seed(0)
            layer = MoE(model_dim=8, hidden_dim=16, num_experts=4, top_k=2)
            tokens = torch.randn(topology.data_parallel_size, 6, 8)
            layer(tokens)
            reference = layer.tokens_per_expert.clone()
            layer.parallelize(topology, schedule=schedule)  # type: ignore[arg-type]
            layer(tokens[topology.data_parallel_rank])
            metric = ExpertLoad(num_layers=1, num_experts=4)
            metric.update(layer.tokens_per_expert.unsqueeze(0))
            metric.compute()
            metric.sync()
            results.append((metric.counts[0].clone(), reference))
            metric.unsync()
    return results


def test_sum_over_ranks_counts_each_token_once_under_model_parallelism() -> None:
    for results in run_ranks(4, loads, [(1, 4, 1), (2, 2, 2), (4, 1, 4), (2, 1, 2)]):
        for counts, reference in results:
            assert counts.sum() == reference.sum() > 0
            torch.testing.assert_close(counts.float(), reference)
