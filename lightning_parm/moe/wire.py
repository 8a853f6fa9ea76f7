"""Starts collectives: the backend's own or, in gloo's small groups, sends between each pair of ranks.

gloo scatters a reduction by giving everyone all of it, which sends twice the bytes; two ranks that exchange through its
AlltoAll send one after the other rather than at once; and its AllGather and AllReduce pass on from rank to rank, each
of which waits for a core. Pairs of sends do none of this. In large groups they are too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

#: Ranks of a small group.
_FEW = 4
#: Bytes of a small sum, all that one rank would receive: a ring of more ranks saves bytes and costs two steps for each.
_SMALL = 2**16
#: Of our sends, so that a program's own in the same group are not taken for them.
_TAG = 0x9A12


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Returns when the result is there; on CUDA, when the current stream will find it there."""


def start_all_to_all(
    received: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
) -> Work:
    """Send ``send[i]`` rows to peer i and receive ``receive[i]`` from it."""
    if _is_gloo(group, rows) and group.size() <= _FEW:
        return _Pairs(received.split(list(receive)), rows.split(list(send)), group)
    return _own(dist.all_to_all_single(received, rows, list(receive), list(send), group=group, async_op=True))


def start_all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> Work:
    """Gather equal flat parts in rank order."""
    if _is_gloo(group, part) and group.size() <= _FEW:
        return _Pairs(whole.chunk(group.size()), [part] * group.size(), group)
    return _own(dist.all_gather_single(whole, part, group=group, async_op=True))


def start_reduce_scatter(part: Tensor, rows: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Work:
    """Sum rows over the ranks and leave ``sizes[i]`` of them to peer i, each its own in ``part``."""
    in_pairs = _is_gloo(group, rows)
    if not in_pairs and len(set(sizes)) == 1:
        return _own(dist.reduce_scatter_single(part.view(-1), rows.view(-1), group=group, async_op=True))
    parts = part.new_empty((len(sizes), *part.shape))
    if in_pairs:
        return _Sum(part, parts, _Pairs(parts.unbind(), rows.split(list(sizes)), group))
    return _Sum(part, parts, start_all_to_all(parts.flatten(0, 1), rows, [len(part)] * len(sizes), sizes, group))


def start_all_reduce(buffer: Tensor, group: dist.ProcessGroup) -> Work:
    """Sum over the ranks, in place."""
    if _is_gloo(group, buffer) and buffer.nbytes * group.size() <= _SMALL:
        parts = buffer.new_empty((group.size(), *buffer.shape))
        return _Sum(buffer, parts, _Pairs(parts.unbind(), [buffer] * group.size(), group))
    return _own(dist.all_reduce(buffer, group=group, async_op=True))


def sum_float32(parts: Sequence[Tensor]) -> Tensor:
    """Sum of equally shaped tensors, accumulated in at least float32 and rounded once."""
    if len(parts) == 1:
        return parts[0]
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def _is_gloo(group: dist.ProcessGroup, rows: Tensor) -> bool:
    return rows.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _own(work: dist.Work | None) -> dist.Work:
    return cast(dist.Work, work)  # nothing else in groups that this rank belongs to


class _Pairs:
    """A part from each peer and a part to each; peers match them by the order in which they were started."""

    def __init__(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        after = [(rank + step) % size for step in range(1, size)]
        before = reversed(after)
        # receives first: a send waits for the word that its receiver is ready
        self._works = [group.recv([incoming[peer]], peer, _TAG) for peer in before if incoming[peer].numel()]
        self._works += [group.send([outgoing[peer]], peer, _TAG) for peer in after if outgoing[peer].numel()]
        incoming[rank].copy_(outgoing[rank])

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Sum:
    """What arrives from every rank, added up in rank order when all is there, so equally wherever it is wanted."""

    def __init__(self, result: Tensor, parts: Tensor, arriving: Work) -> None:
        self._result, self._parts, self._arriving = result, parts, arriving

    def wait(self) -> None:
        self._arriving.wait()
        self._result.copy_(sum_float32(self._parts.unbind()))
