"""The predicted time of a layer is made of exactly the bytes that its schedule sends, and the best one is chosen."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_parm.moe.choice import MARGIN, best, candidates, choose, choose_for, comparisons
from lightning_parm.moe.cost import Workload, collectives
from lightning_parm.moe.links import PUBLISHED_32_GPUS, Line, Links
from lightning_parm.moe.prediction import Candidate, seconds, steps
from lightning_parm.moe.timeline import Compute, Sent, Transfer, duration, moments
from lightning_parm.moe.topology import Topology

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
#: Seconds are bytes, so that times are volumes.
BYTES = Links(
    {kind: Line(0.0, 1.0) for kind in KINDS}, flops_per_second=float("inf"), copy_bytes_per_second=float("inf")
)


def workload(mp: int, ep: int, esp: int, **fields: Any) -> Workload:
    defaults: dict[str, Any] = {"num_tokens": 768, "model_dim": 64, "hidden_dim": 128, "num_experts": 8, "top_k": 2}
    return Workload(**{**defaults, **fields}, tensor_parallel_size=mp, expert_parallel_size=ep, expert_shard_size=esp)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4, 2), (4, 2, 4), (2, 4, 1), (4, 8, 2), (1, 8, 1), (2, 2, 4)])
def test_predictions_are_made_of_the_bytes_that_the_schedules_send(
    sizes: tuple[int, int, int], static: bool, sequence_parallel: bool
) -> None:
    work = workload(
        *sizes,
        capacity_factor=1.5 if static else None,
        static_shapes=static,
        sequence_parallel=sequence_parallel,
        auxiliary_loss=False,
    )
    for candidate in [*candidates(work, max_chunks=3), *comparisons(work)[:1]]:
        if candidate.schedule == "deepspeed":
            continue
        predicted: Counter[tuple[str, bool]] = Counter()
        for part in steps(candidate, work, BYTES):
            for step in (step for chunk in part for step in chunk if isinstance(step, Transfer)):
                for backward, sent in ((False, step.forward), (True, step.backward)):
                    if sent is not None:
                        predicted[sent.axis, backward] += round(sent.seconds)
        sent_bytes: Counter[tuple[str, bool]] = Counter()
        for call in collectives(work, candidate.schedule, candidate.transport, candidate.chunks):
            is_count = call.kind != "all_reduce" and call.num_bytes <= 3072  # of rows: only an alpha in the model
            of_weights = candidate.schedule == "s0" and call.num_bytes == 768 * 2 * 4  # neglected, beside all else
            sent_bytes[call.axis, call.backward] += 0 if is_count or of_weights else call.num_bytes
        assert +predicted == +sent_bytes, candidate


def test_chunks_hide_the_shorter_of_computing_and_sending_and_cost_their_alphas() -> None:
    work = workload(2, 4, 2, num_tokens=4096, model_dim=512, hidden_dim=2048)
    slow_start = {kind: Line(1.0, 1e-9) for kind in KINDS}
    quick_start = {kind: Line(1e-6, 1e-9) for kind in KINDS}
    hidden = {"compute+fused": 1.0, "compute+tensor_parallel": 1.0}
    one, four = Candidate("s1", "fused", 1), Candidate("s1", "fused", 4)
    flops = 5e11
    overlapped = Links(quick_start, flops, 1e13, overlaps=hidden)
    serial = Links(quick_start, flops, 1e13)
    assert seconds(four, work, overlapped) < 0.8 * seconds(one, work, overlapped)
    assert seconds(four, work, serial) == pytest.approx(seconds(one, work, serial), rel=1e-3)
    assert choose_for(work, overlapped).chunks > 2
    assert choose_for(work, replace(overlapped, host_runs_ahead=False)).chunks == 2  # ranks share cores
    assert choose_for(work, overlapped, allowed=lambda each: each.chunks == 4).chunks == 4  # a user's own wish
    assert choose_for(work, Links(slow_start, flops, 1e13, overlaps=hidden)).chunks == 1


def test_fast_nodes_ask_for_two_hops_and_equal_links_for_one() -> None:
    def chosen(inside: float, between: float) -> Candidate:
        lines = {f"{kind}/{axis}": Line(1e-5, inside) for kind in KINDS for axis in ("expert_shard", "tensor_parallel")}
        lines |= {f"all_to_all/{axis}": Line(1e-5, between) for axis in ("expert_parallel", "fused")}
        links = Links(lines, 1e14, 1e12)
        topology = Topology(32, 0, 4, 8, 4)
        return choose(topology, 4096, 1024, 4096, 8, 2, 1.2, links, static_shapes=True).candidate

    assert chosen(inside=1e-11, between=1e-9).transport == "two_hop"
    assert chosen(inside=1e-9, between=1e-9).transport == "fused"


def test_tiny_layers_ask_for_the_fewest_collectives() -> None:
    links = Links({kind: Line(1e-3, 1e-10) for kind in KINDS}, 1e14, 1e12)
    choice = choose(Topology(8, 0, 2, 4, 2), 8, 64, 64, 8, 1, None, links)
    assert (choice.schedule, choice.chunks) == ("plain", 1)


def test_comparisons_are_predicted_and_never_chosen() -> None:
    topology = Topology(32, 0, 4, 8, 4)
    choice = choose(topology, 4096, 1024, 4096, 8, 2, 1.2, PUBLISHED_32_GPUS, static_shapes=True)
    assert {Candidate("baseline"), Candidate("deepspeed")} < choice.seconds.keys()
    assert choice.seconds[choice.candidate] <= min(choice.seconds.values()) * (1 + MARGIN)
    assert choice.seconds[Candidate("baseline")] > 4 * choice.seconds[choice.candidate]


def test_a_user_who_fixed_the_schedule_gets_the_best_of_it() -> None:
    topology = Topology(8, 0, 2, 4, 2)

    def chosen(allowed: Any) -> Candidate:
        return choose(topology, 64, 64, 64, 8, 1, None, PUBLISHED_32_GPUS, allowed=allowed).candidate

    assert chosen(lambda each: each.schedule == "s2").schedule == "s2"
    with pytest.raises(ValueError, match="None of the schedules, transports and numbers of chunks that run here"):
        chosen(lambda each: False)


def test_sizes_that_forbid_a_schedule_are_refused() -> None:
    for schedule in ("plain", "s0", "deepspeed"):
        with pytest.raises(ValueError, match=f"schedule='{schedule}' does not run with N_MP=4 and N_ESP=2"):
            steps(Candidate(schedule), workload(4, 8, 2), BYTES)  # type: ignore[arg-type]
    assert not {"plain", "s0"} & {each.schedule for each in candidates(Topology(32, 0, 4, 8, 2))}
    assert comparisons(Topology(32, 0, 4, 8, 2)) == [Candidate("baseline")]


def test_of_nearly_equal_candidates_the_simpler_is_taken() -> None:
    one, four = Candidate("s1", "fused", 1), Candidate("s1", "fused", 4)
    assert best([one, four], {one: 1.01, four: 1.0}) == one
    assert best([one, four], {one: 1.04, four: 1.0}) == four
    assert best([one, four], {one: 1.04, four: 1.0}, margin=0.05) == one
    other = Candidate("s2", "fused", 1)
    assert best([one, other, four], {one: 1.015, other: 1.01, four: 1.0}) == other
    plain = Candidate("plain")
    assert best([plain, one, other], {plain: 1.015, one: 1.0, other: 1.01}) == plain
    assert best([plain, one, other], {plain: 1.03, one: 1.0, other: 1.01}) == one


def test_things_in_flight_share_what_they_cannot_overlap() -> None:
    first, second = Transfer(Sent("a", 4.0), Sent("a", 4.0)), Transfer(Sent("b", 2.0), Sent("b", 2.0))
    happened = moments([[first], [second]])
    for backward in (False, True):
        assert duration(happened, lambda a, b: 0.0, backward) == pytest.approx(6.0)
        assert duration(happened, lambda a, b: 1.0, backward) == pytest.approx(4.0)
        assert duration(happened, lambda a, b: 0.5, backward) == pytest.approx(5.0)
    work = Compute(1.0, 2.0)
    assert duration(moments([[first, work, second]]), lambda a, b: 1.0) == 7.0
    assert duration(moments([[first, work, second]]), lambda a, b: 1.0, backward=True) == 8.0
    assert moments([[], []]) == []


def test_what_overlaps_a_collective_overlaps_its_start_too() -> None:
    sent = Sent("a", 4.0, start=1.0)
    happened = moments([[Transfer(sent, sent)], [Transfer(sent, sent)]])
    for backward in (False, True):
        assert duration(happened, lambda a, b: 0.0, backward) == pytest.approx(10.0)
        assert duration(happened, lambda a, b: 0.5, backward) == pytest.approx(7.5)
        assert duration(happened, lambda a, b: 1.0, backward) == pytest.approx(5.0)
