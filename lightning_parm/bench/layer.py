"""``lightning-parm bench layer``: forward and backward of one MoE layer against what its matrix products alone take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parm.moe.layer import MoE

Run = Callable[[], object]


def layer(
    num_tokens: int = 4096,
    model_dim: int = 512,
    hidden_dim: int = 2048,
    num_experts: int = 8,
    top_k: int = 2,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    repetitions: int = 7,
) -> dict[str, Any]:
    """Time the MoE layer on one process, dropless, forward and backward, beside its peers.

    The peers: the same FLOPs as plain matrix products, a loop over experts, and Hugging Face's Mixtral block with its
    ``eager`` and ``grouped_mm`` experts, where transformers is installed. All take turns, so that a busy machine
    disturbs all alike; times are medians.

    Args:
        num_tokens: S.
        model_dim: M.
        hidden_dim: H.
        num_experts: E.
        top_k: k.
        dtype: Of parameters and tokens.
        device: Where to run; ``auto`` takes a GPU if there is one.
        repetitions: Turns, after one that is not counted.

    Returns:
        The sizes, and for every contestant ``seconds`` and ``share_of_dense``, its FLOP rate over that of the plain
        matrix products.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    place = {"device": where, "dtype": getattr(torch, dtype)}
    torch.manual_seed(0)
    ours = MoE(model_dim, hidden_dim, num_experts, top_k, **place)
    x = torch.randn(num_tokens, model_dim, **place).requires_grad_()
    gradient = torch.randn(num_tokens, model_dim, **place)
    contestants: dict[str, Run] = {
        "dense matrix products": _products(num_tokens * top_k, model_dim, hidden_dim, place),
        "lightning-parm MoE": _training(ours, x, gradient),
        "loop over experts": _training(_Loop(ours), x, gradient),
    }
    if find_spec("transformers") is not None:
        for kind in ("eager", "grouped_mm"):
            contestants[f"transformers Mixtral, {kind}"] = _training(_mixtral(ours, kind), x.unsqueeze(0), gradient)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repetitions + 1):
        for name, run in contestants.items():
            seconds = _timed(run, where)
            if turn:
                times[name].append(seconds)
    dense = statistics.median(times["dense matrix products"])
    return {
        "sizes": {"S": num_tokens, "M": model_dim, "H": hidden_dim, "E": num_experts, "k": top_k},
        "device": torch.cuda.get_device_name() if where == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "dtype": dtype,
        "flops": 18 * num_tokens * top_k * model_dim * hidden_dim,
        "contestants": {
            name: {"seconds": statistics.median(each), "share_of_dense": dense / statistics.median(each)}
            for name, each in times.items()
        },
    }


def render(result: dict[str, Any]) -> Any:
    """A table of the contestants, fastest first."""
    from rich.table import Table

    sizes = ", ".join(f"{name}={size}" for name, size in result["sizes"].items())
    table = Table(title=f"One MoE layer, forward and backward: {sizes}, {result['dtype']}, {result['device']}")
    table.add_column("contestant")
    for heading in ("milliseconds", "TFLOP/s", "share of dense"):
        table.add_column(heading, justify="right")
    for name, each in sorted(result["contestants"].items(), key=lambda item: item[1]["seconds"]):
        rate = result["flops"] / each["seconds"] / 1e12
        table.add_row(name, f"{1000 * each['seconds']:.1f}", f"{rate:.3g}", f"{each['share_of_dense']:.2f}")
    return table


def _products(rows: int, model_dim: int, hidden_dim: int, place: dict[str, Any]) -> Run:
    """The products of one SwiGLU network on all rows, forward and backward, without anything between them."""
    x, hidden = torch.randn(rows, model_dim, **place), torch.randn(rows, hidden_dim, **place)
    both = torch.randn(rows, 2 * hidden_dim, **place)
    w_in = torch.randn(2 * hidden_dim, model_dim, **place)
    w_out = torch.randn(model_dim, hidden_dim, **place)
    pairs = [(x, w_in.t()), (hidden, w_out.t()), (x, w_out), (x.t(), hidden), (both, w_in), (both.t(), x)]
    return lambda: [torch.mm(left, right) for left, right in pairs]


def _training(module: nn.Module, x: Tensor, gradient: Tensor) -> Run:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(x).view_as(gradient).backward(gradient)

    return run


def _timed(run: Run, where: str) -> float:
    if where == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if where == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


class _Loop(nn.Module):
    """What one writes first: for every expert, find its tokens, apply it, add."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        choice, _ = self.moe.router(x)
        y = torch.zeros_like(x)
        for expert, (w_in, w_out) in enumerate(zip(self.moe.experts.w_in, self.moe.experts.w_out, strict=True)):
            token, which = torch.where(choice.expert == expert)
            gate, up = F.linear(x[token], w_in.flatten(0, 1)).chunk(2, -1)
            weight = choice.weight[token, which].unsqueeze(1).to(x.dtype)
            y = y.index_add(0, token, F.linear(F.silu(gate) * up, w_out) * weight)
        return y


def _mixtral(moe: MoE, kind: str) -> nn.Module:
    """Hugging Face's block with the same weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=moe.model_dim,
        intermediate_size=moe.hidden_dim,
        num_local_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
    )
    config._experts_implementation = kind
    block: nn.Module = MixtralSparseMoeBlock(config)  # type: ignore[no-untyped-call]
    block.to(moe.experts.w_in.device, moe.experts.w_in.dtype)
    ours = {
        "gate.weight": moe.router.weight,
        "experts.gate_up_proj": moe.experts.w_in.flatten(1, 2),
        "experts.down_proj": moe.experts.w_out,
    }
    block.load_state_dict({name: weight.detach() for name, weight in ours.items()})
    return block
