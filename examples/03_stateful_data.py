"""Save, kill, resume and rescale: not one sample is lost or repeated.

Run it from the repository: ``python examples/03_stateful_data.py``. It writes a small corpus, trains in a process that
is killed in the middle of a step, goes on with another number of ranks, workers and samples a batch, and compares what
both runs consumed with a run that was never interrupted.
"""

import json
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from lightning_parm.data import TokenLoader


def write_corpus(folder: Path) -> None:
    """Write 2,000 documents of random tokens; 0 stands between documents."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 50_000, rng.integers(20, 800)).astype(np.uint16) for _ in range(2000)]
    schema = pa.schema([pa.field("tokens", pa.list_(pa.uint16()))], metadata={"delimiter": "0"})
    for number in range(4):
        with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(pa.table({"tokens": documents[number::4]}, schema=schema))


def ranks(folder: Path, size: int, batch_size: int, num_workers: int = 0) -> list[TokenLoader]:
    """Return the loaders of all data-parallel ranks, which in training live in a process each."""
    return [TokenLoader(str(folder), 128, batch_size, rank, size, num_workers=num_workers) for rank in range(size)]


def train_until_killed(folder: Path, journal: Path) -> None:
    """Train on 4 ranks; after each step write what was consumed and the state, and die in the 100th step."""
    loaders = ranks(folder, size=4, batch_size=2, num_workers=1)
    with journal.open("w") as file:
        for step in range(100):
            consumed = [sample for loader in loaders for sample in loader.next_batch()["sample_index"].tolist()]
            if step == 99:
                os.kill(os.getpid(), signal.SIGKILL)
            file.write(json.dumps({"consumed": consumed, "state": loaders[0].state_dict()}) + "\n")
            file.flush()


def main() -> None:
    """Show it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, journal = Path(temporary, "data"), Path(temporary, "journal")
        folder.mkdir()
        write_corpus(folder)

        process = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(folder, journal))
        process.start()
        os.waitpid(process.pid, 0)
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        consumed = [sample for line in lines for sample in line["consumed"]]
        state = lines[-1]["state"]
        print(f"4 ranks x 2 samples: killed in step 100 after {len(consumed)} samples")
        print(f"the state is {len(json.dumps(state))} bytes of JSON, the same on every rank")

        rows = {}
        for size, batch_size, steps in [(3, 5, 20), (7, 1, 30)]:
            loaders = ranks(folder, size, batch_size)
            for loader in loaders:
                loader.load_state_dict(state)
            for _ in range(steps):
                for loader in loaders:
                    batch = loader.next_batch()
                    rows |= dict(zip(batch["sample_index"].tolist(), batch["input_ids"].tolist(), strict=True))
            state = loaders[0].state_dict()
            print(f"{size} ranks x {batch_size} samples: went on to sample {state['samples']}")

        everything = consumed + list(rows)
        print(f"samples consumed: {len(everything)}, of them different: {len(set(everything))}")
        assert sorted(everything) == list(range(state["samples"]))
        whole = ranks(folder, 1, 1)[0]
        expected = [whole.next_batch()["input_ids"][0].tolist() for _ in range(state["samples"])]
        assert all(expected[sample] == row for sample, row in rows.items())
        print("every sample once, and token for token those of a run on one rank that was never interrupted")


if __name__ == "__main__":
    main()
