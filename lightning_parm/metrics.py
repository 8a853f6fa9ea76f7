"""Expert load as a torchmetrics metric: how evenly the tokens of each MoE layer are spread over its experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class ExpertLoad(Metric):
    """Load of the experts of every MoE layer, from the numbers of tokens that were routed to them.

    Counts are summed over updates and, in :meth:`compute`, over all ranks. ``MoE.tokens_per_expert`` is scaled so that
    this sum over the whole world is right under model parallelism too, where peers route the same tokens.

    :meth:`compute` returns, with the load of an expert being its share of the layer's tokens:

    - ``utilisation`` ``(L, E)``: load relative to a fair share; 1 is fair, 0 is an expert without a token;
    - ``load_max_over_mean`` ``(L,)``: the largest utilisation of a layer;
    - ``maxvio`` ``(L,)``: the largest violation ``max(utilisation) - 1`` (Wang et al. 2024, "Auxiliary-loss-free load
      balancing", section 4.1);
    - ``dead_experts`` ``(L,)``: experts without a token.

    Where layers have fewer experts than the largest, ``utilisation`` is NaN past the layer's own. A layer that saw no
    token has utilisation 0. With one layer the ``(L,)`` results are 0-dim, as torchmetrics has it.

    Args:
        num_layers: Number of MoE layers L.
        num_experts: Experts E of a layer, one number or one a layer.
        sync_on_compute: Sum over ranks in :meth:`compute`.

    Raises:
        ValueError: The list ``num_experts`` has not one entry a layer, or a size is below 1.

    Example:
        >>> metric = ExpertLoad(num_layers=2, num_experts=4)
        >>> metric.update(torch.tensor([[5.0, 5.0, 5.0, 5.0], [10.0, 10.0, 0.0, 0.0]]))
        >>> load = metric.compute()
        >>> load["load_max_over_mean"].tolist(), load["dead_experts"].tolist()
        ([1.0, 2.0], [0, 2])
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False

    counts: Tensor
    exists: Tensor

    def __init__(self, num_layers: int, num_experts: int | list[int], sync_on_compute: bool = True) -> None:
        super().__init__(sync_on_compute=sync_on_compute)
        sizes = [num_experts] * num_layers if isinstance(num_experts, int) else list(num_experts)
        if num_layers < 1 or len(sizes) != num_layers or min(sizes) < 1:
            raise ValueError(
                f"num_layers={num_layers} and num_experts={num_experts} do not fit: give at least one layer, "
                "and one number of experts for all layers or one for each."
            )
        self.add_state("counts", torch.zeros(num_layers, max(sizes), dtype=torch.float64), dist_reduce_fx="sum")
        self.register_buffer("exists", torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(-1), persistent=False)

    def update(self, tokens_per_expert: Tensor | Sequence[Tensor]) -> None:
        """Add the counts of one batch.

        Args:
            tokens_per_expert: ``(L, E)``, or one ``(E,)`` tensor a layer, which may differ in length.

        Raises:
            ValueError: The shapes are not those of the layers.
        """
        if isinstance(tokens_per_expert, Tensor) and tokens_per_expert.shape == self.counts.shape:
            self.counts += tokens_per_expert
            return
        sizes = self.exists.sum(-1).tolist()
        shapes = [tuple(row.shape) for row in tokens_per_expert]
        if shapes != [(size,) for size in sizes]:
            raise ValueError(
                f"tokens_per_expert has the shapes {shapes}, and the layers of this ExpertLoad have {sizes} experts: "
                "give one count for every expert of every layer."
            )
        for total, row in zip(self.counts, tokens_per_expert, strict=True):
            total[: row.numel()] += row

    def compute(self) -> dict[str, Tensor]:
        """Return the statistics of all tokens seen, see the class."""
        fair = self.counts.sum(-1, keepdim=True) / self.exists.sum(-1, keepdim=True)
        utilisation = (self.counts / fair.clamp(min=torch.finfo(fair.dtype).tiny)).float()
        largest = utilisation.amax(-1)
        return {
            "utilisation": utilisation.masked_fill(~self.exists, float("nan")),
            "load_max_over_mean": largest,
            "maxvio": largest - 1,
            "dead_experts": ((self.counts == 0) & self.exists).sum(-1),
        }

    def plot(self, val: dict[str, Tensor] | None = None, ax: Any = None) -> tuple[Any, Any]:
        """Draw the utilisation of every expert as a map of layers and experts.

        Args:
            val: A result of :meth:`compute`; computed when not given.
            ax: A matplotlib axes to draw on; a new figure when not given.

        Returns:
            The figure and the axes.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
        """
        try:
            from matplotlib import pyplot as plt
        except ModuleNotFoundError:
            raise ModuleNotFoundError("ExpertLoad.plot needs matplotlib: pip install 'lightning-parm[plot]'.") from None
        utilisation = (self.compute() if val is None else val)["utilisation"].cpu()
        fig, ax = plt.subplots() if ax is None else (ax.get_figure(), ax)
        image = ax.imshow(utilisation.numpy(), aspect="auto", cmap="coolwarm", vmin=0, vmax=2)
        fig.colorbar(image, ax=ax, label="load / fair share", extend="max")
        ax.set_xlabel("expert")
        ax.set_ylabel("MoE layer")
        ax.set_xticks(range(utilisation.shape[1]))
        ax.set_yticks(range(utilisation.shape[0]))
        return fig, ax
