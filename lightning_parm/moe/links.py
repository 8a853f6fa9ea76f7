"""How fast a cluster communicates and computes: the constants of the cost model; pure Python.

A collective of ``b`` bytes takes ``alpha + beta * b`` seconds, and never less than the smallest one was seen to take: a
line through large messages says little of small ones, which wait for peers rather than for the link and which a link
that rested may carry at once, so that ``alpha`` is negative. ``b`` counts the whole buffer: what a rank puts into an
AlltoAll or ReduceScatter, what it gets out of an AllGather, and the buffer of an AllReduce. Lines are kept for each
kind of collective and each axis, since an axis inside a node is faster than one across nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Kind = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]
LinkAxis = Literal["fused", "expert_parallel", "expert_shard", "tensor_parallel"]


@dataclass(frozen=True)
class Line:
    """Seconds as a line over bytes.

    Attributes:
        alpha_seconds: Where the line starts; negative only where there is a floor.
        beta_seconds: Per byte.
        floor_seconds: The least that any takes.

    Example:
        >>> Line(alpha_seconds=0.001, beta_seconds=1e-9).seconds(1_000_000)
        0.002
        >>> burst = Line(alpha_seconds=-0.001, beta_seconds=1e-9, floor_seconds=0.0005)
        >>> burst.seconds(1_000_000), burst.seconds(3_000_000)
        (0.0005, 0.002)
    """

    alpha_seconds: float
    beta_seconds: float
    floor_seconds: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Seconds that ``num_bytes`` take."""
        return max(self.alpha_seconds + self.beta_seconds * num_bytes, self.floor_seconds)

    @property
    def start_seconds(self) -> float:
        """Seconds before the first byte is on its way."""
        return max(self.alpha_seconds, self.floor_seconds)


@dataclass(frozen=True)
class Links:
    """Everything the cost model knows of a cluster and of the groups that were cut from it.

    Attributes:
        collectives: A line for ``"kind/axis"``; ``"kind"`` alone serves every axis that has none of its own.
        flops_per_second: Of the experts' products on one rank, while all ranks compute.
        copy_bytes_per_second: At which rows are put in another order.
        overlaps: For ``"a+b"``, two axes or an axis and ``compute``, in alphabetical order: how much of the shorter of
            two things vanishes when both run at once; 0 is nothing and 1 all of it.
        overheads: For ``"schedule/transport"``, seconds of a layer and of each further chunk that bytes do not explain.
        host_runs_ahead: Whether the host's work for a chunk hides behind what is in flight, as where GPUs do the rest;
            where the same cores compute and communicate it does not, and predictions are less sure.
        route_bytes_per_second: At which rows are picked for tokens, or weighted and added up to them, which reads and
            writes several times; as quick as a copy where it is ``None``.
        residual: Largest relative error of the fitted lines on what they were fitted to.
        source: Where the constants are from.

    Example:
        >>> links = Links({"all_to_all": Line(1e-5, 1e-10), "all_to_all/fused": Line(1e-5, 2e-10)}, 1e14, 1e12)
        >>> links.seconds("all_to_all", "fused", 10**6), links.seconds("all_to_all", "expert_parallel", 10**6)
        (0.00021, 0.00011)
        >>> Links.from_json(links.to_json()) == links
        True
    """

    collectives: Mapping[str, Line]
    flops_per_second: float
    copy_bytes_per_second: float
    overlaps: Mapping[str, float] = field(default_factory=dict)
    overheads: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    host_runs_ahead: bool = True
    route_bytes_per_second: float | None = None
    residual: float = 0.0
    source: str = ""

    def line(self, kind: Kind, axis: LinkAxis) -> Line:
        """Of one collective, with all groups along ``axis`` busy at once.

        Raises:
            ValueError: If there is no line for it.
        """
        line = self.collectives.get(f"{kind}/{axis}") or self.collectives.get(kind)
        if line is None:
            raise ValueError(
                f"These links have no constants for {kind} over {axis}, only for "
                f"{', '.join(sorted(self.collectives))}; calibrate on groups of the same sizes."
            )
        return line

    def seconds(self, kind: Kind, axis: LinkAxis, num_bytes: float) -> float:
        """Seconds of one collective of so many bytes."""
        return self.line(kind, axis).seconds(num_bytes)

    def overlap(self, first: str, second: str) -> float:
        """How much of the shorter vanishes when an exchange along each axis is in flight, or one beside ``compute``."""
        return self.overlaps.get("+".join(sorted((first, second))), 0.0)

    def to_json(self) -> str:
        """As text, to be read by :meth:`from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Links:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: If the text is something else.
        """
        try:
            fields = json.loads(text)
            fields["collectives"] = {name: Line(**line) for name, line in fields["collectives"].items()}
            fields["overheads"] = {name: (layer, chunk) for name, (layer, chunk) in fields["overheads"].items()}
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"This is no calibration ({error!r}); write one with Links.save().") from error

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all."""
        partial = Path(f"{path}.partial")
        partial.write_text(self.to_json())
        partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Links:
        """Read a JSON file.

        Raises:
            ValueError: If it is no calibration.
        """
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def fit_line(
    sizes: Sequence[float],
    times: Sequence[float],
    rounds: int = 10,
    floor: float = 0.0,
) -> tuple[Line, float]:
    """Fit a line by relative least squares in which outliers weigh less; returns it and its largest relative error.

    Args:
        sizes: Bytes.
        times: Seconds.
        rounds: Of reweighting by Huber's function.
        floor: The least seconds that any takes; with one, the line may start below zero.

    Example:
        >>> line, residual = fit_line([1e4, 1e5, 1e6], [0.0011, 0.002, 0.011])
        >>> round(line.alpha_seconds, 6), round(line.beta_seconds, 12), round(residual, 6)
        (0.001, 1e-08, 0.0)
    """
    trust = [1.0] * len(sizes)
    alpha = beta = 0.0
    for _ in range(rounds):
        weights = [part / (time * time) for part, time in zip(trust, times, strict=True)]
        total = sum(weights)
        mean_size = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
        mean_time = sum(w * time for w, time in zip(weights, times, strict=True)) / total
        spread = sum(w * (size - mean_size) ** 2 for w, size in zip(weights, sizes, strict=True))
        slope = sum(
            w * (size - mean_size) * (time - mean_time) for w, size, time in zip(weights, sizes, times, strict=True)
        )
        beta = max(slope / spread, 0.0) if spread else 0.0
        alpha = mean_time - beta * mean_size
        alpha = alpha if floor else max(alpha, 0.0)
        errors = [abs(alpha + beta * size - time) / time for size, time in zip(sizes, times, strict=True)]
        scale = max(1.5 * sorted(errors)[len(errors) // 2], 0.02)
        trust = [min(1.0, scale / error) if error else 1.0 for error in errors]
    line = Line(alpha, beta, floor)
    return line, max(abs(line.seconds(size) - time) / time for size, time in zip(sizes, times, strict=True))


#: Constants published by Parm's authors for their 32-GPU cluster, one line a kind for every axis. They published
#: neither a compute rate nor overlaps: compute and copies cost nothing here, and nothing overlaps.
PUBLISHED_32_GPUS = Links(
    collectives={
        "all_to_all": Line(0.175e-3, 3.06e-10),
        "all_gather": Line(0.032e-3, 1.68e-10),
        "reduce_scatter": Line(0.0391e-3, 1.67e-10),
        "all_reduce": Line(0.0837e-3, 5.99e-10),
    },
    flops_per_second=float("inf"),
    copy_bytes_per_second=float("inf"),
    source="the 32-GPU cluster of Pan et al., Parm, INFOCOM 2024, as published by the authors",
)
