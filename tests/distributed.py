"""Real gloo process groups for tests: forked ranks, a file store, a deadline, and the first rank's traceback."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _child(
    rank: int, world_size: int, store: str, timeout: float, connection: Any, function: Callable[..., Any], args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        message = pickle.dumps(
            (True, function(rank, world_size, *args))
        )  # tensors by value: this process is about to end
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    connection.send_bytes(message)
    connection.close()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on ``world_size`` forked gloo ranks and return their results.

    Results travel through a pipe, so they must be picklable; tensors are best returned detached. When a rank fails,
    the others are ended and the failing rank's traceback is raised; the same when ``timeout`` seconds have passed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_child, args=(rank, world_size, store, timeout, pipe[1], function, args))
            for rank, pipe in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, writer in pipes:
            writer.close()
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        try:
            while len(results) < world_size:
                readers = {pipes[r][0]: r for r in range(world_size) if r not in results}
                ready = multiprocessing.connection.wait(list(readers), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(
                        f"ranks {sorted(readers.values())} of {world_size} did not finish in {timeout} s"
                    )
                for reader in ready:
                    rank = readers[reader]
                    try:
                        succeeded, value = pickle.loads(reader.recv_bytes())
                    except EOFError:
                        raise RuntimeError(f"rank {rank} of {world_size} died without a result") from None
                    if not succeeded:
                        raise AssertionError(f"rank {rank} of {world_size} failed:\n{value}")
                    results[rank] = value
        finally:
            for process in ranks:
                process.join(timeout=5 if len(results) == world_size else 0.1)
                if process.is_alive():
                    process.kill()
                    process.join()
        return [results[rank] for rank in range(world_size)]
