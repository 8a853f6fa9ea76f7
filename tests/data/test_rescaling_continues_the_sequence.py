"""Any number of ranks, workers and samples a batch continues the same global sequence, sample for sample."""

from __future__ import annotations

import json
import multiprocessing
import time

import numpy as np
import pytest
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.data import TokenLoader, blocks

L = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    documents = numbered_documents(random_lengths(0, 500, 60))
    for file in range(5):
        write_arrow(folder / "web" / f"{file}.arrow", documents[file * 100 : (file + 1) * 100], delimiter=0)
    write_arrow(folder / "code" / "0.arrow", numbered_documents([700, 1, 300], first=100_000), delimiter=0)
    return folder


def loaders(folder, size, batch_size, num_workers=0, **options):
    sources = {"web": str(folder / "web"), "code": str(folder / "code" / "*.arrow")}
    return [
        TokenLoader(sources, L, batch_size, rank, size, num_workers=num_workers, seed=3, **options)
        for rank in range(size)
    ]


def run(ranks, steps):
    """Return ``{sample: tokens}`` of the next steps of all ranks, checking that no sample comes twice."""
    seen = {}
    for _ in range(steps):
        for loader in ranks:
            batch = loader.next_batch()
            rows = np.concatenate([batch["input_ids"].numpy(), batch["labels"].numpy()[:, -1:]], axis=1)
            for sample, row in zip(batch["sample_index"].tolist(), rows, strict=True):
                assert sample not in seen
                seen[sample] = row.tolist()
    return seen


@pytest.fixture(scope="module")
def uninterrupted(folder):
    return run(loaders(folder, 1, 1), 2500)


def test_workers_that_run_ahead_wait_for_the_block_in_use(folder, uninterrupted, monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK_TOKENS", 64 * (L + 1))  # blocks of 32 batches, so that their memory goes round
    (loader,) = loaders(folder, 1, 2, num_workers=2)
    read = {}
    for step in range(600):
        read |= run([loader], 1)
        if step % 32 in (31, 15):
            time.sleep(0.02)  # the workers could have filled everything by now
    assert read == {sample: uninterrupted[sample] for sample in range(1200)}


def test_a_seek_ends_the_processes_that_read_ahead(folder, uninterrupted):
    (loader,) = loaders(folder, 1, 2, num_workers=2)
    before = set(multiprocessing.active_children())
    for samples in (40, 10):
        loader.seek(samples)
        read = run([loader], 3)
        assert read == {sample: uninterrupted[sample] for sample in range(samples, samples + 6)}
        assert len(set(multiprocessing.active_children()) - before) == 2
    loader.close()
    assert set(multiprocessing.active_children()) <= before
    assert run([loader], 1).keys() == {16, 17}
    loader.close()


HISTORIES = [
    [(4, 2, 0, 5), (2, 3, 0, 4), (3, 1, 0, 7)],
    [(2, 4, 2, 3), (3, 5, 1, 1), (7, 1, 0, 1), (1, 13, 2, 9)],
    [(5, 3, 0, 1), (1, 1, 1, 1), (1, 1, 0, 1), (8, 8, 0, 30)],
]


@pytest.mark.parametrize("history", HISTORIES)
def test_ranks_workers_and_batch_sizes_do_not_change_the_sequence(folder, uninterrupted, history):
    state, seen = None, {}
    for size, batch_size, num_workers, steps in history:
        ranks = loaders(folder, size, batch_size, num_workers)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(json.loads(json.dumps(state)))
        part = run(ranks, steps)
        assert not part.keys() & seen.keys()
        seen |= part
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert sorted(seen) == list(range(state["samples"]))
    assert all(uninterrupted[sample] == row for sample, row in seen.items())


def test_a_ledger_over_three_epochs_and_five_rescales(tmp_path):
    lengths = random_lengths(5, 60, 25)
    write_arrow(tmp_path / "0.arrow", numbered_documents(lengths), delimiter=None)
    whole = TokenLoader(str(tmp_path), 8, 1)
    num_shards = whole.order.readers[0].num_shards
    share = sum(lengths) // num_shards
    needed = num_shards * (3 * (share + 1) // 8 + 1)
    rows, state = {}, None
    for size, batch_size, num_workers, steps in [(4, 2, 0, 5), (2, 3, 1, 9), (3, 1, 0, 20), (7, 1, 0, 6), (1, 5, 2, 8)]:
        ranks = [TokenLoader(str(tmp_path), 8, batch_size, r, size, num_workers=num_workers) for r in range(size)]
        for loader in ranks if state else []:
            loader.load_state_dict(json.loads(state))
        rows |= run(ranks, steps)
        state = json.dumps(ranks[-1].state_dict())
    whole.load_state_dict(json.loads(state))
    rows |= run([whole], needed - len(rows))
    assert sorted(rows) == list(range(needed))
    assert num_shards > 1
    _, shards, numbers = whole.order.locate(np.arange(needed), whole.mixture)
    streams = [
        [rows[i][:-1] for i in sorted(np.flatnonzero(shards == s), key=numbers.__getitem__)] for s in range(num_shards)
    ]
    epochs = [[], [], []]
    for shard, stream in enumerate(streams):
        tokens, size = (
            np.concatenate(stream),
            (shard + 1) * sum(lengths) // num_shards - shard * sum(lengths) // num_shards,
        )
        for number, epoch in enumerate(epochs):
            epoch += tokens[number * size : (number + 1) * size].tolist()
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, sum(lengths) + 1))  # none is missing and none comes twice
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_restoring_at_every_step_gives_the_rest_of_the_run(folder, uninterrupted):
    loader = loaders(folder, 1, 3)[0]
    for step in range(60):
        fresh = loaders(folder, 1, 2)[0] if step % 10 == 0 else fresh  # noqa: F821 - bound in the first round
        fresh.load_state_dict(loader.state_dict())
        rest = run([fresh], 4)
        assert sorted(rest) == list(range(3 * step, 3 * step + 8))
        assert all(uninterrupted[sample] == row for sample, row in rest.items())
        loader.next_batch()


def test_a_changed_mix_acts_on_the_next_batch_and_is_replayed(folder):
    def changed(num_workers):
        ranks = loaders(folder, 2, 4, num_workers)
        first = run(ranks, 5)
        for loader in ranks:
            loader.set_weights({"web": 0.0, "code": 1.0})
        return first, run(ranks, 5), ranks

    (first, second, ranks), (first_too, second_too, _) = changed(0), changed(2)
    assert (first, second) == (first_too, second_too)
    assert sorted(second) == list(range(40, 80))
    assert all(token == 0 or token >= 100_000 for row in second.values() for token in row)
    resumed = loaders(folder, 1, 5, 1)[0]
    resumed.load_state_dict(ranks[0].state_dict())
    assert run([resumed], 3) == {k: v for k, v in run(ranks, 2).items() if k < 95}


def test_served_counts_follow_the_weights(folder):
    loader = loaders(folder, 1, 8, weights={"web": 3.0, "code": 1.0})[0]
    run([loader], 100)
    assert loader.served() == {"web": 600, "code": 200}
    assert loader.served(0) == {"web": 0, "code": 0}


def test_each_rank_reads_its_own_logical_shards_when_the_batch_divides_them(folder):
    ranks = loaders(folder, 4, 2)
    shards = []
    for loader in ranks:
        samples = np.concatenate([loader.next_batch()["sample_index"].numpy() for _ in range(200)])
        source, shard, _ = loader.order.locate(samples, loader.mixture)
        shards.append(set(shard[source == 0].tolist()))
    assert ranks[0].order.readers[0].num_shards == 32
    assert all(not a & b for i, a in enumerate(shards) for b in shards[:i])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_first_batch_far_into_a_run_comes_at_once(folder, num_workers):
    saved = loaders(folder, 4, 2)[1].state_dict(samples=1_200_000)
    seconds = []
    for _ in range(5):
        resumed = loaders(folder, 3, 8, num_workers)[2]
        began = time.process_time()  # of this process alone: the machine may be busy
        resumed.load_state_dict(saved)
        batch = resumed.next_batch()
        seconds.append(time.process_time() - began)
        assert batch["sample_index"][0] == 1_200_000 + 2 * 8
    assert min(seconds) < 0.05


def test_a_batch_that_does_not_divide_the_shards_is_said_once(folder, caplog):
    loaders(folder, 4, 2)
    loaders(folder, 1, 3)
    assert not caplog.records
    loaders(folder, 3, 2)
    assert [record.message for record in caplog.records] == [
        "size * batch_size = 6 does not divide num_logical_shards = 1024, so ranks share logical shards: "
        "every sample still comes once, but files are read by several ranks."
    ]


def test_iterating_starts_where_the_stream_stands(folder):
    loader = loaders(folder, 1, 4)[0]
    iter(loader)
    first = next(iter(loader))["sample_index"].tolist()
    assert first == [0, 1, 2, 3]
    assert next(iter(loader))["sample_index"].tolist() == [4, 5, 6, 7]
    epoch = [batch["sample_index"][0].item() for batch in loader]
    assert epoch == list(range(8, 8 + 4 * len(loader), 4))
    resumed = loaders(folder, 1, 2)[0]
    state = loader.state_dict(samples=8 + 40)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == -(-(resumed.samples_per_epoch - 40) // 2)
    assert len(list(resumed)) == len(resumed)
