"""Dispatch and combine for any choices: what is sent, in which order, and that combine is dispatch's transpose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from lightning_parm.moe.layout import Layout, pick, ranges, sum_rows, take
from lightning_parm.moe.routing import Choice, arrange, arrange_static, capacity, drop, token_ranges

SHAPES = st.tuples(st.integers(0, 12), st.integers(1, 3), st.integers(3, 6), st.integers(0, 2**31))


def random_choice(shape: tuple[int, int, int, int]) -> tuple[Choice, torch.Tensor]:
    num_tokens, top_k, num_experts, seed = shape
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    weight, expert = scores.topk(top_k, -1)
    return Choice(expert, weight), torch.randn(num_tokens, 4, generator=generator, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, factor=st.sampled_from([None, 0.3, 1.0]), policy=st.sampled_from(["position", "probability"]))
def test_combine_after_dispatch_weighs_every_token_by_its_kept_choices(
    shape: tuple[int, int, int, int], factor: float | None, policy: str
) -> None:
    choice, x = random_choice(shape)
    num_tokens, top_k, num_experts, _ = shape
    if factor is not None:
        most = capacity(num_tokens, top_k, num_experts, factor)
        choice = drop(choice, num_experts, [num_tokens], [most], policy)  # type: ignore[arg-type]
    routing = arrange(choice, num_experts)
    routing = routing.trimmed(int(routing.counts.sum()))
    kept = choice.weight if choice.kept is None else choice.weight * choice.kept
    torch.testing.assert_close(routing.combine(routing.dispatch(x)), x * kept.sum(-1, keepdim=True))
    sent = choice.expert.flatten() if choice.kept is None else choice.expert[choice.kept]
    assert routing.counts.flatten().tolist() == sent.bincount(minlength=num_experts).tolist()
    assert routing.dispatch(x).shape == (len(sent), 4)
    experts = choice.expert.flatten()[routing.source]
    assert bool((experts.diff() >= 0).all())


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, chunks=st.integers(1, 4), peers=st.integers(1, 4))
def test_peers_and_chunks_share_all_rows_out_evenly_and_sorted(
    shape: tuple[int, int, int, int], chunks: int, peers: int
) -> None:
    choice, x = random_choice(shape)
    num_experts = shape[2]
    routing = arrange(choice, num_experts, chunks, peers)
    assert routing.counts.sum((0, 1)).tolist() == choice.expert.flatten().bincount(minlength=num_experts).tolist()
    loads = routing.counts.sum(-1)
    assert not loads.numel() or loads.max() - loads.min() <= 1
    torch.testing.assert_close(routing.combine(routing.dispatch(x)), x * choice.weight.sum(-1, keepdim=True))
    start = 0
    for count in routing.counts.sum(-1).flatten().tolist():
        assert bool((choice.expert.flatten()[routing.source[start : start + count]].diff() >= 0).all())
        start += count


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, chunks=st.integers(1, 4), factor=st.sampled_from([None, 0.5]))
def test_ranges_of_tokens_together_do_what_the_whole_does(
    shape: tuple[int, int, int, int], chunks: int, factor: float | None
) -> None:
    choice, x = random_choice(shape)
    if factor is not None:
        choice = drop(choice, shape[2], [shape[0]], [capacity(*shape[:3], factor)], "position")
    whole = arrange(choice, shape[2])
    whole = whole.trimmed(int(whole.counts.sum()))
    routing = arrange(choice, shape[2], chunks)
    routing = routing.trimmed(int(routing.counts.sum()))
    parts = routing.chunks(routing.counts.sum((1, 2)).tolist())
    tokens = torch.split(x, [last - first for first, last in token_ranges(len(x), chunks)])
    done = [part.combine(part.dispatch(own) * 3) for part, own in zip(parts, tokens, strict=True)]
    torch.testing.assert_close(torch.cat(done), whole.combine(whole.dispatch(x) * 3))


@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, chunks=st.integers(1, 3), peers=st.integers(1, 3))
def test_static_shapes_send_the_same_choices_and_zeros(
    shape: tuple[int, int, int, int], chunks: int, peers: int
) -> None:
    choice, x = random_choice(shape)
    num_tokens, _, num_experts, _ = shape
    most = capacity(*shape[:3], 0.7)
    choice = drop(choice, num_experts, [num_tokens], [most], "position")
    assert choice.kept is not None
    routing = arrange_static(choice, num_experts, most, chunks, peers)
    rows = routing.dispatch(x)
    assert routing.static == -(-most // (chunks * peers))
    assert len(rows) == num_experts * chunks * peers * routing.static
    assert not bool(rows[routing.source < 0].any())
    assert int((routing.source >= 0).sum()) == int(choice.kept.sum())
    kept = (choice.weight * choice.kept).sum(-1, keepdim=True)
    torch.testing.assert_close(routing.combine(rows), x * kept)
    expert_of_row = torch.arange(num_experts).repeat_interleave(routing.static).repeat(chunks * peers)
    real = routing.source >= 0
    assert torch.equal(choice.expert.flatten()[routing.source[real]], expert_of_row[real])


@pytest.mark.parametrize("factor", [None, 0.5])
def test_gradients_of_dispatch_and_combine_are_numerically_right(factor: float | None) -> None:
    choice, x = random_choice((5, 2, 4, 0))
    if factor is not None:
        choice = drop(choice, 4, [5], [capacity(5, 2, 4, factor)], "position")
    weight = choice.weight.clone().requires_grad_()
    routing = arrange(Choice(choice.expert, weight, choice.kept, choice.position), 4)
    routing = routing.trimmed(int(routing.counts.sum()))

    def through(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        again = type(routing)(routing.counts, routing.source, routing.slots, weight, routing.gaps)
        return again.combine(again.dispatch(x).sin())

    assert gradcheck(through, (x.requires_grad_(), weight))


@settings(max_examples=40, deadline=None)
@given(
    table=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=1, max_size=4),
    copies=st.integers(1, 3),
)
def test_orders_of_received_rows_are_inverse_and_copies_fold_to_their_sum(table: list[list[int]], copies: int) -> None:
    layout = Layout(tuple(sum(row) for row in table), tuple(map(tuple, table)), torch.device("cpu"))
    rows = torch.arange(float(sum(map(sum, table)))).unsqueeze(1)
    labels = torch.tensor([[float(e)] for row in table for e in range(2) for _ in range(row[e])]).view(-1, 1)
    assert bool((layout.by_expert(labels).flatten().diff() >= 0).all())
    assert torch.equal(layout.by_source(layout.by_expert(rows)), rows)
    assert torch.equal(layout.folded(layout.repeated(rows, copies), copies), copies * rows)


def test_gradients_of_take_are_numerically_right() -> None:
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    index, transposed = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[0, 0, 1, 1]])
    assert gradcheck(lambda rows: take(rows, index, transposed), (rows,))


def test_sums_of_copies_round_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert sum_rows(rows, torch.tensor([[0], [1], [2]])).item() == 258.0  # 256 + 1 + 1 is 256 in a bfloat16 running sum
    even = Layout((1,), ((1,),), torch.device("cpu"))
    assert even.folded(rows, copies=3).item() == 258.0
    one = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    even.repeated(one, copies=3).backward(rows)
    assert one.grad is not None
    assert one.grad.item() == 258.0


def test_gaps_are_zeros_even_where_there_is_nothing_to_pick() -> None:
    missing = torch.tensor([[True], [False]])
    assert pick(torch.full((1, 2), torch.nan), torch.tensor([0, 0]), missing)[0].tolist() == [0.0, 0.0]
    assert pick(torch.empty(0, 2), torch.tensor([0, 0]), torch.ones_like(missing)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert ranges([], [], torch.device("cpu")).tolist() == []
