"""Real processes, ended with SIGKILL in the middle of an epoch."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.data import TokenLoader


def train(folder: str, journal: str, size: int, batch_size: int, num_workers: int, steps: int) -> None:
    """Step until killed; a step counts when its line, with the state after it, is on disk."""
    ranks = [TokenLoader(folder, 16, batch_size, rank, size, num_workers=num_workers) for rank in range(size)]
    lines = Path(journal).read_text().splitlines() if Path(journal).exists() else []
    if lines:
        for loader in ranks:
            loader.load_state_dict(json.loads(lines[-1])["state"])
    with Path(journal).open("a") as file:
        for step in range(steps):
            rows = {}
            for loader in ranks:
                batch = loader.next_batch()
                rows |= dict(zip(batch["sample_index"].tolist(), batch["input_ids"].tolist(), strict=True))
            if step == steps - 1:
                os.kill(os.getpid(), signal.SIGKILL)  # this step was fetched, and is not on disk
            file.write(json.dumps({"rows": rows, "state": ranks[0].state_dict()}) + "\n")
            file.flush()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on a machine of two cores
@pytest.mark.parametrize("workers", [(0, 1, 2), (2, 3, 0), (3, 2, 1)])
def test_the_union_of_what_was_consumed_is_exact(tmp_path, workers):
    write_arrow(tmp_path / "data" / "0.arrow", numbered_documents(random_lengths(0, 100, 40)), delimiter=0)
    folder, journal = str(tmp_path / "data"), str(tmp_path / "journal")
    context = multiprocessing.get_context("fork")
    for (size, batch_size, steps), num_workers in zip([(2, 3, 9), (3, 1, 14), (1, 5, 6)], workers, strict=True):
        process = context.Process(target=train, args=(folder, journal, size, batch_size, num_workers, steps))
        process.start()
        _, status = os.waitpid(process.pid, 0)  # join() would wait for the orphaned workers to notice
        assert os.WTERMSIG(status) == signal.SIGKILL
    consumed = {}
    for line in Path(journal).read_text().splitlines():
        for sample, row in json.loads(line)["rows"].items():
            assert int(sample) not in consumed
            consumed[int(sample)] = row
    assert sorted(consumed) == list(range(8 * 6 + 13 * 3 + 5 * 5))
    whole = TokenLoader(folder, 16, 1)
    assert all(consumed[sample] == whole.next_batch()["input_ids"][0].tolist() for sample in range(len(consumed)))
