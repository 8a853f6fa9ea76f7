import json
import time

import numpy as np
import pytest
import torch.distributed
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.data import TokenLoader


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        write_arrow(folder / f"source-{number}" / "0.arrow", numbered_documents(random_lengths(number, 200, 50)))
    return folder


def loader(folder, **options):
    return TokenLoader(str(folder), 16, 4, delimiter=0, **options)


def changed(loader, changes):
    rng = np.random.default_rng(0)
    for _ in range(changes):
        for _ in range(rng.integers(1, 4)):
            loader.next_batch()
        loader.set_weights({source.name: round(float(rng.random()), 2) for source in loader.sources})
    return loader


def test_under_2_kb_for_8_sources_and_100_mix_changes_and_the_same_whatever_else(mixed):
    state = changed(loader(mixed), 100).state_dict()
    assert len(json.dumps(state)) < 2000
    sizes = {
        len(json.dumps({**loader(mixed, num_workers=workers, num_logical_shards=shards).state_dict(), "order": 0}))
        for workers, shards in [(0, 1), (2, 1024)]
    }
    assert len(sizes) == 1


def test_ten_times_the_documents_add_a_digit_to_each_count(tmp_path):
    sizes = []
    for count in (100, 1000):
        write_arrow(tmp_path / str(count) / "0.arrow", numbered_documents([50] * count), delimiter=0)
        sizes.append(len(json.dumps(TokenLoader(str(tmp_path / str(count)), 16, 4).state_dict())))
    assert abs(sizes[1] - sizes[0]) <= 4  # documents, tokens, and the weight in the mix


def test_a_hundred_changes_replay_on_resume(mixed):
    original = changed(loader(mixed), 100)
    resumed = TokenLoader(str(mixed), 16, 3, delimiter=0)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert resumed.served() == original.served()
    assert resumed.state_dict() == original.state_dict()
    rows = {}
    for stream in (original, resumed):
        for _ in range(12):
            batch = stream.next_batch()
            for sample, row in zip(batch["sample_index"].tolist(), batch["input_ids"].tolist(), strict=True):
                assert rows.setdefault(sample, row) == row


@pytest.mark.parametrize("changes", [3, 100])
def test_taking_it_takes_well_under_a_millisecond_and_no_collective(mixed, monkeypatch, changes):
    def forbidden(*args, **kwargs):
        raise AssertionError("a collective was issued")

    stream = changed(loader(mixed, num_logical_shards=16), changes)
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(torch.distributed, name, forbidden)
    between, beginning = [], []  # of rounds of all lanes, and states that digest another sample than the one before
    for _ in range(200):
        stream.next_batch()
        digested = stream._digested
        began = time.thread_time()  # of this process alone: the machine may be busy
        stream.state_dict()
        (between if stream._digested == digested else beginning).append(time.thread_time() - began)
    assert len(beginning) >= 50
    assert np.quantile(beginning, 0.25) < 1e-3
    assert np.quantile(between, 0.25) < 1e-4


def test_it_is_the_same_however_it_was_reached(mixed):
    stream, digests = changed(loader(mixed, num_logical_shards=16), 20), []
    for samples in [0, 1, 16, 17, 18, 48, 49, 33, 17, 49, 1]:
        state = stream.state_dict(samples)
        anew = loader(mixed, num_logical_shards=16)
        anew.load_state_dict(state)
        assert anew.state_dict() == state
        digests.append(state["digest"])
    assert digests[0] is None
    assert digests[1] == digests[2] == digests[10] != digests[3]
    assert digests[3] == digests[4] == digests[8]
    assert digests[6] == digests[9]


def test_it_is_a_snapshot(mixed):
    stream = loader(mixed)
    state = stream.state_dict()
    before = json.dumps(state)
    changed(stream, 3)
    assert json.dumps(state) == before


def test_a_state_of_another_version_is_refused(mixed):
    stream = loader(mixed)
    with pytest.raises(ValueError, match="has version 99 and this package reads 2"):
        stream.load_state_dict({**stream.state_dict(), "version": 99})


def test_bytes_changed_in_place_are_found_before_the_first_step(tmp_path):
    documents = numbered_documents([40] * 50)
    write_arrow(tmp_path / "0.arrow", documents, delimiter=0)
    stream = TokenLoader(str(tmp_path), 16, 4)
    for _ in range(5):
        stream.next_batch()
    state = stream.state_dict()
    TokenLoader(str(tmp_path), 16, 4).load_state_dict(state)
    write_arrow(tmp_path / "0.arrow", [document + 1 for document in documents], delimiter=0)
    with pytest.raises(
        ValueError, match=r"a sample shortly before the checkpoint \(sample 20\) are not what they were"
    ):
        TokenLoader(str(tmp_path), 16, 4).load_state_dict(state)
