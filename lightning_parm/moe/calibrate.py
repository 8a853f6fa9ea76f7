"""Measures the constants of the cost model on the running groups, in a few seconds, and keeps them on disk.

All groups along an axis talk at once, as they do in a layer, and a measurement is that of the slowest rank. What runs
at the same time is measured at the same time: overlaps are not assumed. Wrong or stale constants cost speed only.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_parm.moe.choice import candidates
from lightning_parm.moe.cost import Workload
from lightning_parm.moe.experts import Experts
from lightning_parm.moe.layer import MoE
from lightning_parm.moe.links import Kind, Line, LinkAxis, Links, fit_line
from lightning_parm.moe.prediction import Candidate, seconds
from lightning_parm.moe.routing import Choice, arrange_static, capacity, drop
from lightning_parm.moe.topology import Topology
from lightning_parm.moe.wire import Work, start_all_gather, start_all_reduce, start_all_to_all, start_reduce_scatter

#: Bytes of the smallest collective, and the least and most that the largest may have.
_SIZES = {"cpu": (2**14, 2**18, 2**21), "cuda": (2**16, 2**22, 2**26)}
#: Repetitions: fewer where one takes so long that little disturbs it.
_REPETITIONS, _LEAST_REPETITIONS, _SECONDS = 5, 3, 0.5
_LINES: tuple[tuple[Kind, LinkAxis], ...] = (
    ("all_to_all", "expert_parallel"),
    ("all_to_all", "fused"),
    ("all_to_all", "expert_shard"),
    ("all_gather", "expert_shard"),
    ("all_gather", "tensor_parallel"),
    ("reduce_scatter", "expert_shard"),
    ("all_reduce", "expert_shard"),
    ("all_reduce", "tensor_parallel"),
)
_SENT, _FUSED, _SPREAD, _GATHERED = _LINES[0], _LINES[1], _LINES[3], _LINES[4]
#: What schedules have in flight together; ``None`` is the rank's own work.
_PAIRS = (
    *((_FUSED, other) for other in (_FUSED, _GATHERED, None)),
    *((_SENT, other) for other in (_SENT, _SPREAD, _GATHERED, None)),
    *((_SPREAD, other) for other in (_SPREAD, None)),
    *((_GATHERED, other) for other in (_GATHERED, None)),
)


def calibrate(
    topology: Topology,
    device: torch.device | str,
    cache_folder: str | Path | None = None,
    refresh: bool = False,
    largest_bytes: float = 0.0,
) -> Links:
    """Measure the cluster for a topology; every rank must call it, and every rank gets the same constants.

    The random state of the process stays as it was.

    Args:
        topology: The sizes of the groups.
        device: Where this rank computes.
        cache_folder: Where constants are kept by hosts, backend, sizes and versions; ``None`` measures every time.
        refresh: Whether to measure although there are kept constants.
        largest_bytes: Of one collective of the layers at hand: near their sizes lines are both quickest measured and
            most exact. It is rounded to a power of two within what the device is used for.

    Raises:
        ValueError: If the topology has one rank only, which has no links.

    Example:
        >>> calibrate(Topology.local(), "cpu")
        Traceback (most recent call last):
        ...
        ValueError: One rank has no links to calibrate; calibrate where torch.distributed has at least 2 ranks.
    """
    if topology.world_size == 1:
        raise ValueError("One rank has no links to calibrate; calibrate where torch.distributed has at least 2 ranks.")
    device = torch.device(device)
    smallest, least, most = _SIZES.get(device.type, _SIZES["cuda"])
    largest = min(max(2 ** round(math.log2(max(largest_bytes, 1.0))), least), most)
    name = _fingerprint(topology, device, largest)
    path = None if cache_folder is None else Path(cache_folder) / f"links-{name}.json"
    found: list[Links | None] = [None]
    if topology.rank == 0 and path is not None and path.exists() and not refresh:
        try:
            found = [Links.load(path)]
        except ValueError:
            found = [None]  # a broken file is measured anew
    dist.broadcast_object_list(found, 0)
    if found[0] is None:
        found = [_Calibration(topology, device, (smallest, largest // 4, largest // 2, largest)).links()]
        dist.broadcast_object_list(found, 0)
        if topology.rank == 0 and path is not None and found[0] is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found[0].save(path)
    assert found[0] is not None
    return found[0]


def collective(
    kind: Kind, axis: LinkAxis, num_bytes: float, topology: Topology, device: torch.device
) -> Callable[[], Work]:
    """Something that starts a collective of so many bytes, on buffers of its own.

    Args:
        kind: What it does.
        axis: Over which group, of at least 2 ranks.
        num_bytes: The larger of its two buffers.
        topology: The groups.
        device: Where the buffers are.
    """
    group, size = topology.group(axis), topology.size(axis)
    part = max(int(num_bytes) // 4 // size, 1)
    whole, other = (torch.zeros(part * size, device=device) for _ in range(2))
    shard = torch.zeros(part, device=device)
    assert group is not None, "a collective needs at least 2 ranks"
    parts = [part] * size
    calls: dict[Kind, Callable[[], Work]] = {
        "all_to_all": lambda: start_all_to_all(other, whole, parts, parts, group),
        "all_gather": lambda: start_all_gather(other, shard, group),
        "reduce_scatter": lambda: start_reduce_scatter(shard, whole, parts, group),
        "all_reduce": lambda: start_all_reduce(whole, group),
    }
    return calls[kind]


def _fingerprint(topology: Topology, device: torch.device, largest: int) -> str:
    hosts: list[str] = [""] * topology.world_size
    dist.all_gather_object(hosts, platform.node())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    sizes = (topology.tensor_parallel_size, topology.expert_parallel_size, topology.expert_shard_size)
    facts = [hosts, dist.get_backend(), sizes, torch.__version__, name, largest, 8]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


class _Calibration:
    """One run of all measurements."""

    def __init__(self, topology: Topology, device: torch.device, sizes: tuple[int, ...]) -> None:
        self.topology = topology
        self.device = device
        self.sizes = sizes

    def links(self) -> Links:
        generators = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(generators):
            lines, residual = self._lines()
            rates = self._compute_rate(), self._copy_rate()
            route = self._route_rate()
            source = f"measured on {platform.node()}"
            ahead = self.device.type == "cuda"
            links = Links(lines, *rates, self._overlaps(), {}, ahead, route, residual, source)
            return replace(links, overheads=self._overheads(links))

    def _time(
        self,
        *runs: Callable[[], object],
        over: Callable[[list[float]], float] = statistics.median,
        flow: bool = False,
        least: int = _LEAST_REPETITIONS,
    ) -> list[float]:
        """Median over repetitions, in turn, of the slowest rank's seconds; the same numbers on every rank.

        Args:
            runs: What is timed.
            over: What is made of the repetitions.
            flow: Whether each timing follows at once on another run of the same: a link that was idle swallows the
                first bytes quicker than it carries a stream.
            least: Repetitions, however long they take.
        """
        times: list[list[float]] = [[] for _ in runs]
        repetitions = 1
        while len(times[0]) < repetitions:
            for run, seen in zip(runs, times, strict=True):
                self._synchronize()
                dist.barrier()
                if flow:
                    run()
                    self._synchronize()
                started = time.perf_counter()
                run()
                self._synchronize()
                seen.append(time.perf_counter() - started)
            if repetitions == 1:  # the first warms up, and says how many there will be
                total = self._slowest([[sum(seen[0] for seen in times)]])[0][0]
                repetitions = min(max(round(_SECONDS / total), least), _REPETITIONS)
                times = [[] for _ in runs]
        return [max(over(seen), 1e-9) for seen in self._slowest(times)]

    def _slowest(self, times: list[list[float]]) -> list[list[float]]:
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()

    def _collective(self, kind: Kind, axis: LinkAxis, num_bytes: float) -> Callable[[], Work]:
        return collective(kind, axis, num_bytes, self.topology, self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _lines(self) -> tuple[dict[str, Line], float]:
        lines: dict[str, Line] = {}
        residuals = [0.0]
        for kind, axis in _LINES:
            if self.topology.size(axis) == 1:
                continue
            twin: LinkAxis = "expert_parallel" if axis == "fused" else "expert_shard"
            same = self.topology.size(twin) > 1 and self.topology.group(twin) is self.topology.group(axis)
            if same and f"{kind}/{twin}" in lines:
                lines[f"{kind}/{axis}"] = lines[f"{kind}/{twin}"]
                continue
            smallest, *sizes = self.sizes
            (floor,) = self._time(waited(self._collective(kind, axis, smallest)), over=min, least=_REPETITIONS)
            times = self._time(*(waited(self._collective(kind, axis, size)) for size in sizes))
            lines[f"{kind}/{axis}"], residual = fit_line(sizes, times, floor=floor)
            residuals.append(residual)
        return lines, max(residuals)

    def _compute_rate(self) -> float:
        """Of forward and backward of one expert, all ranks busy."""
        rows, dim, dtype = (512, 512, torch.float32) if self.device.type == "cpu" else (4096, 4096, torch.bfloat16)
        experts = Experts(dim, dim, 1, "gelu", device=self.device, dtype=dtype)
        experts.reset_parameters(0)
        x = torch.randn(rows, dim, device=self.device, dtype=dtype, requires_grad=True)
        return 3 * 2 * 2 * rows * dim * dim / self._time(lambda: experts(x, [rows]).sum().backward())[0]

    def _copy_rate(self) -> float:
        rows = torch.zeros(self.sizes[-1] // 1024, 256, device=self.device)
        order = torch.randperm(len(rows), device=self.device)
        return rows.nbytes / self._time(lambda: rows.index_select(0, order))[0]

    def _route_rate(self) -> float:
        """Of dispatch and combine, forward and backward."""
        tokens, experts = self.sizes[-1] // 1024, 8
        x = torch.randn(tokens, 256, device=self.device, requires_grad=True)
        expert = torch.randint(experts, (tokens, 1), device=self.device)
        choice = Choice(expert, torch.ones(tokens, 1, device=self.device, requires_grad=True))
        most = capacity(tokens, 1, experts, 1.2)
        routing = arrange_static(drop(choice, experts, [tokens], [most], "position"), experts, most)
        rows = experts * most
        time = self._time(lambda: routing.combine(routing.dispatch(x)).backward(x.detach()))[0]
        return 4 * rows * 256 * x.element_size() / time

    def _overlaps(self) -> dict[str, float]:
        """How much vanishes of the shorter of two things; what cannot be taken apart from noise counts as nothing."""
        overlaps: dict[str, float] = {}
        matrix = torch.zeros(256, 256, device=self.device)
        (product,) = self._time(lambda: matrix @ matrix)
        size = self.sizes[-1] // 2  # that of a chunk
        for first, second in _PAIRS:
            if self.topology.size(first[1]) == 1 or (second is not None and self.topology.size(second[1]) == 1):
                continue
            start = self._collective(*first, size)
            if second is None:
                (length,) = self._time(waited(start), flow=True)
                finish = self._products(matrix, max(round(length / product), 1))
            else:
                finish = waited(self._collective(*second, size))
            names = sorted((first[1], "compute" if second is None else second[1]))
            overlaps["+".join(names)] = self._hidden(start, finish)
        return overlaps

    def _hidden(self, start: Callable[[], Work], finish: Callable[[], object]) -> float:
        alone, beside, together = self._time(waited(start), finish, _both(start, finish), flow=True)
        return min(max((alone + beside - together) / min(alone, beside), 0.0), 1.0)

    def _products(self, matrix: torch.Tensor, count: int) -> Callable[[], object]:
        return lambda: [matrix @ matrix for _ in range(count)]

    def _overheads(self, links: Links) -> dict[str, tuple[float, float]]:
        """What a layer with next to nothing to send costs beyond what its collectives take at the least."""
        topology, dim = self.topology, 16 * self.topology.expert_shard_size
        experts, tokens = topology.expert_parallel_size, 8 * topology.tensor_parallel_size
        torch.manual_seed(0)  # all ranks hold the same weights
        layer = MoE(dim, dim, experts, top_k=1, activation="gelu", device=self.device).parallelize(topology)
        torch.manual_seed(topology.data_parallel_rank)  # and mp peers the same tokens
        x = torch.randn(tokens, dim, device=self.device, requires_grad=True)
        work = Workload(
            num_tokens=tokens,
            model_dim=dim,
            hidden_dim=dim,
            num_experts=experts,
            top_k=1,
            tensor_parallel_size=topology.tensor_parallel_size,
            expert_parallel_size=experts,
            expert_shard_size=topology.expert_shard_size,
            num_matrices=2,
        )

        def run(candidate: Candidate) -> Callable[[], None]:
            def forward_and_backward() -> None:
                assert candidate.schedule != "deepspeed"
                layer.schedule, layer.transport, layer.chunks = candidate.schedule, *candidate[1:]
                layer(x).sum().backward()

            return forward_and_backward

        single = candidates(topology, max_chunks=1)
        chunked = [each._replace(chunks=3) for each in single if each.schedule != "plain"]
        every = [*single, *chunked]
        # the least, since these are differences of small times: whatever disturbs one of them is not the layer's
        times = dict(zip(every, self._time(*map(run, every), over=min, least=_REPETITIONS), strict=True))
        beyond = {each: seen - seconds(each, work, links) for each, seen in times.items()}
        return {
            f"{each.schedule}/{each.transport}": (
                beyond[each],
                max(0.0, beyond.get(each._replace(chunks=3), beyond[each]) - beyond[each]) / 2,
            )
            for each in single
        }


def waited(start: Callable[[], Work]) -> Callable[[], object]:
    """Something that starts a collective and waits for it."""
    return lambda: start().wait()


def _both(start: Callable[[], Work], finish: Callable[[], object]) -> Callable[[], object]:
    """Something that is done while a collective is in flight."""

    def together() -> None:
        work = start()
        finish()
        work.wait()

    return together
