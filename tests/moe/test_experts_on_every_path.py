"""Both grouped products agree with a loop, and precision, recomputation and compilers change nothing but rounding."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from moe.reference import batch, full_layer
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from lightning_parm.moe.experts import (
    Experts,
    _Activate,
    _grouped,
    _GroupedKernel,
    _has_kernel,
    _one_by_one,
    _Weights,
)
from lightning_parm.moe.layer import MoE
from lightning_parm.moe.topology import Topology

COUNTS = [3, 0, 2, 4]


def factors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(9, 16, generator=generator), torch.randn(4, 8, 16, generator=generator)
    return rows.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_agrees_with_a_loop(dtype: torch.dtype) -> None:
    rows, weight = factors(dtype)
    out = _GroupedKernel.apply(rows, weight, COUNTS)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out.backward(gradient)
    plain_rows, plain_weight = factors(dtype)
    pieces = [part @ weight.t() for part, weight in zip(plain_rows.split(COUNTS), plain_weight, strict=True)]
    torch.cat(pieces).backward(gradient)
    torch.testing.assert_close(out, torch.cat(pieces))
    torch.testing.assert_close(rows.grad, plain_rows.grad)
    torch.testing.assert_close(weight.grad, plain_weight.grad)
    assert not bool(weight.grad[1].any())


def plain_activation(name: str, hidden: torch.Tensor) -> torch.Tensor:
    if name == "swiglu":
        gate, up = hidden.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(hidden) if name == "gelu" else F.relu(hidden) ** 2


def experts_of(activation: str, bias: bool, dtype: torch.dtype) -> Experts:
    experts = Experts(16, 8, 4, activation, bias, dtype=dtype)  # type: ignore[arg-type]
    experts.reset_parameters(3)
    return experts


@pytest.mark.parametrize("path", [_one_by_one, _grouped])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu_squared"])
def test_both_paths_equal_plain_layers(activation: str, bias: bool, path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_parm.moe.experts._has_kernel", lambda *_: path is _grouped)
    experts, plain = (experts_of(activation, bias, torch.float32) for _ in range(2))
    rows, plain_rows = factors(torch.float32)[0], factors(torch.float32)[0]
    gradient = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    out = experts(rows, COUNTS)
    out.backward(gradient)
    pieces = []
    for expert, part in enumerate(plain_rows.split(COUNTS)):
        hidden = part @ plain.w_in[expert].flatten(0, 1).t() + (plain.b_in[expert].flatten() if bias else 0.0)
        pieces.append(
            plain_activation(activation, hidden) @ plain.w_out[expert].t() + (plain.b_out[expert] if bias else 0.0)
        )
    torch.cat(pieces).backward(gradient)
    torch.testing.assert_close(out, torch.cat(pieces))
    torch.testing.assert_close(rows.grad, plain_rows.grad)
    for ours, theirs in zip(experts.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert not bool(ours.grad[1].any()), "the second expert has no rows"


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu_squared"])
def test_gradients_of_the_experts_are_numerically_right(activation: str) -> None:
    experts = experts_of(activation, True, torch.float64)
    parameters = [p.detach().flatten(1, 2) if p is experts.w_in else p.detach() for p in experts.parameters()]
    w_in, w_out, b_in, b_out = (p.clone().requires_grad_() for p in parameters)
    rows = factors(torch.float64)[0]
    assert gradcheck(
        lambda rows, *weights: _one_by_one(rows, _Weights(*weights), COUNTS, activation),
        (rows, w_in, w_out, b_in.flatten(1), b_out),
    )
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda hidden: _Activate.apply(hidden, 2 if activation == "swiglu" else 4, activation), (hidden,))


def test_frozen_experts_pass_gradients_on_to_their_input() -> None:
    experts = experts_of("gelu", True, torch.float32).requires_grad_(False)
    rows = factors(torch.float32)[0]
    experts(rows, COUNTS).sum().backward()
    assert bool(rows.grad.any())
    assert all(parameter.grad is None for parameter in experts.parameters())


@pytest.mark.gpu
def test_the_gpu_uses_the_kernel_and_agrees_with_one_expert_after_the_other() -> None:
    experts = experts_of("swiglu", True, torch.bfloat16).cuda()
    rows = factors(torch.bfloat16)[0].detach().cuda()
    weights = _Weights(experts.w_in.flatten(1, 2), experts.w_out, experts.b_in.flatten(1), experts.b_out)
    apart = _one_by_one(rows, weights, COUNTS, "swiglu")
    assert _has_kernel(rows, weights.w_in)
    torch.testing.assert_close(experts(rows, COUNTS), apart)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation='tanh' is unknown; choose one of swiglu, gelu, relu_squared"):
        Experts(4, 8, 2, activation="tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "relu_squared"])
def test_a_rank_without_rows_has_zero_gradients(activation: str) -> None:
    layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4, activation=activation, expert_bias=True)
    layer(torch.empty(0, 6, dtype=torch.float64)).sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not bool(parameter.grad.any())


def test_autocast_sends_and_computes_in_bfloat16_and_routes_in_float32() -> None:
    layer = full_layer(model_dim=16, hidden_dim=32, num_experts=4, num_shared_experts=1, dtype=torch.float32)
    x = batch(0, 12, 16)[0].float()
    seen: list[torch.dtype] = []
    layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert seen == [torch.bfloat16]
    exact = layer(x)
    assert ((y.float() - exact).norm() / exact.norm()).item() < 0.02
    y.float().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_second_derivatives_are_refused_instead_of_left_out() -> None:
    layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4)
    x = batch(0, 5, 6)[0].requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives; compute gradients without create_graph=True"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_a_bfloat16_layer_works_throughout() -> None:
    layer = full_layer(model_dim=16, hidden_dim=32, num_experts=4, dtype=torch.bfloat16, balance_loss_weight=0.1)
    y = layer(torch.randn(2, 6, 16, dtype=torch.bfloat16))
    (y.float().sum() + layer.auxiliary_loss).backward()
    assert y.dtype == torch.bfloat16
    assert layer.auxiliary_loss.dtype == torch.float32


def _recomputed(rank: int, world: int) -> None:
    x, gradient = batch(rank // 2, 5, 6)
    for schedule, jitter in (("s1", 0.0), ("s0", 0.3), ("s2", 0.3), ("plain", 0.3)):
        results = []
        for recompute in (False, True, "whole"):
            torch.manual_seed(rank)
            layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4, recompute=recompute is True, jitter=jitter)
            layer.parallelize(Topology(world, rank, 2, 2, 2), schedule, "auto", 2)  # type: ignore[arg-type]
            own = x.clone().requires_grad_()
            y = checkpoint(layer, own, use_reentrant=False) if recompute == "whole" else layer(own)
            y.backward(gradient)
            results.append([y.detach(), own.grad, *(parameter.grad for parameter in layer.parameters())])
        for other in results[1:]:
            torch.testing.assert_close(other, results[0], rtol=0, atol=1e-12)


def test_recomputing_the_experts_or_the_whole_layer_changes_nothing_even_with_noise() -> None:
    run_ranks(4, _recomputed)


@pytest.mark.parametrize("schedule", ["s0", "s1", "s2"])
def test_chunks_share_one_cast_of_the_weights_and_add_gradients_up_in_full_precision(schedule: Any) -> None:
    kept, gradients = [], []
    for chunks in (1, 4):
        layer = full_layer(model_dim=16, hidden_dim=128, num_experts=4, top_k=1, dtype=torch.float32)
        layer.parallelize(Topology.local(), schedule, "fused", chunks)
        sizes: dict[int, int] = {}
        held = []

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes, held: list[torch.Tensor] = held) -> torch.Tensor:
            held.append(tensor)
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = batch(0, 32, 16)[0].float().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu"):
            y = layer(x)
        y.float().sum().backward()
        kept.append(sum(sizes.values()))
        gradients.append([parameter.grad for parameter in layer.experts.parameters()])
    assert kept[1] < 1.2 * kept[0]
    for chunked, whole in zip(*gradients, strict=True):
        assert chunked.dtype == torch.float32
        assert ((chunked - whole).norm() / whole.norm()).item() < 0.01


def test_a_checkpoint_that_loses_the_auxiliary_loss_says_so() -> None:
    gradients = []
    for reentrant in (False, True):
        layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4, balance_loss_weight=0.5)
        x = batch(0, 5, 6)[0].requires_grad_()
        with pytest.warns(UserWarning, match="checkpoint with use_reentrant=False") if reentrant else nullcontext():
            y = checkpoint(layer, x, use_reentrant=reentrant)
        (0 * y.sum() + layer.auxiliary_loss).backward()
        gradients.append(layer.router.weight.grad)
    assert bool(gradients[0].any())
    assert not bool(gradients[1].any())


def test_recomputation_keeps_fewer_activations() -> None:
    def kept(recompute: bool) -> int:
        layer = full_layer(model_dim=8, hidden_dim=64, num_experts=2, recompute=recompute)
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(torch.randn(32, 8, dtype=torch.float64, requires_grad=True))
        return sum(sizes.values())

    assert kept(True) < kept(False) / 2


def test_a_layer_can_be_copied_and_pickled_after_a_forward() -> None:
    layer = full_layer(model_dim=6, hidden_dim=8, num_experts=4, balance_loss_weight=0.1)
    x, _ = batch(0, 5, 6)
    y = layer(x)
    assert layer.auxiliary_loss.requires_grad
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not other.auxiliary_loss.requires_grad
        assert torch.equal(other(x), y)


# the compiler's own warnings, about its fake tensors and its way of tracing autograd functions
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:.*should not be instantiated")
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_layers_and_compiled_experts_equal_eager_ones(whole: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer = full_layer(model_dim=8, hidden_dim=16, num_experts=4, activation="gelu", dtype=torch.float32)
    inner = copy.deepcopy(layer)
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Identity(), inner, torch.nn.Tanh()), backend=backend)
    if not whole:
        inner.experts.compile(backend=backend)
        compiled = torch.nn.Sequential(inner, torch.nn.Tanh())
    for count in (6, 9, 4):
        x = batch(count, count, 8)[0].float()
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        layer(one).tanh().sum().backward()
        compiled(other).sum().backward()
        torch.testing.assert_close(other.grad, one.grad)
    torch.testing.assert_close(inner.experts.w_in.grad, layer.experts.w_in.grad)
    assert graphs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 must be positive, or None to drop nothing"),
        ({"static_shapes": True}, "static_shapes=True needs a capacity_factor"),
        ({"static_shapes": True, "capacity_factor": 1.0, "router": "expert_choice"}, "a router by which tokens choose"),
        ({"drop_policy": "random"}, "drop_policy='random' is unknown; choose one of position, probability"),
        ({"num_shared_experts": -1}, "must be at least 1, and num_shared_experts=-1 at least 0"),
        ({"jitter": 1.0}, "jitter=1.0 must be at least 0 and less than 1"),
        ({"balance_scope": "run"}, "balance_scope='run' is unknown; choose one of micro_batch, global_batch"),
    ],
)
def test_layers_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(4, 8, 4, **arguments)


def test_tokens_of_another_size_are_refused_instead_of_cut_anew() -> None:
    for shape in ((4, 8), (2, 2), ()):
        with pytest.raises(ValueError, match=r"The input is of shape \(.*\), but its last dim must be model_dim=4"):
            MoE(4, 8, 4)(torch.ones(shape))


def test_shapes_and_operations_can_be_counted_on_the_meta_device() -> None:
    layer = MoE(8, 16, 4, capacity_factor=1.0, static_shapes=True, num_shared_experts=1, device="meta")
    x = torch.empty(2, 5, 8, device="meta", requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == (x.shape, x.shape)


def test_topologies_and_schedules_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_size=4 does not divide num_experts=6"):
        MoE(4, 8, 6).parallelize(Topology(4, 0, expert_parallel_size=4))
    with pytest.raises(ValueError, match=r"expert_shard_size=4 does not divide hidden_dim=6"):
        MoE(4, 6, 4).parallelize(Topology(4, 0, expert_shard_size=4))
    layer = MoE(4, 8, 4).parallelize(Topology(4, 0, tensor_parallel_size=4, expert_parallel_size=2))
    with pytest.raises(RuntimeError, match=r"This layer is sharded over .* already; parallelize a new one instead"):
        layer.parallelize(Topology(2, 0, expert_parallel_size=2))
    layer.schedule = "plain"
    with pytest.raises(ValueError, match="needs tensor_parallel_size = expert_shard_size, but they are 4 and 1"):
        layer(torch.randn(2, 4))
    odd = MoE(4, 12, 4).parallelize(Topology(6, 0, tensor_parallel_size=2, expert_shard_size=3), "baseline")
    with pytest.raises(ValueError, match="to divide the other, but they are 2 and 3"):
        odd(torch.randn(2, 4))
    layer.schedule, layer.chunks = "s1", 2.0  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"chunks=2.0 cannot run; .* and chunks count from 1"):
        layer(torch.randn(2, 4))
    layer.schedule, layer.chunks = "s3", 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="schedule='s3', transport='fused', chunks=1 cannot run; the schedules are"):
        layer(torch.randn(2, 4))
