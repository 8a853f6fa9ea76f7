import numpy as np
import pytest
import torch
from data.corpora import numbered_documents, random_lengths, write_arrow
from torch.utils.data import DataLoader

from lightning_parm.data import EvaluationLoader, TokenLoader

DOCUMENTS = numbered_documents(random_lengths(1, 60, 12))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_arrow(folder / "0.arrow", DOCUMENTS, delimiter=0)
    return str(folder)


def test_document_ids_positions_and_labels_respect_documents(folder):
    plain = TokenLoader(folder, 32, 3, seed=1)
    marked = TokenLoader(folder, 32, 3, seed=1, document_ids=True, position_ids=True, mask_document_starts=True)
    firsts = {int(document[0]) for document in DOCUMENTS}
    for _ in range(10):
        a, b = plain.next_batch(), marked.next_batch()
        assert torch.equal(a["input_ids"], b["input_ids"])
        for ids, labels, documents, places, expected in zip(
            *(b[k].tolist() for k in ("input_ids", "labels", "document_ids", "position_ids")),
            a["labels"].tolist(),
            strict=True,
        ):
            for i in range(1, 32):
                new = ids[i - 1] == 0  # a delimiter ends every document
                assert documents[i] - documents[i - 1] == new
                assert places[i] == (0 if new else places[i - 1] + 1)
            assert (documents[0], places[0]) == (0, 0)
            assert labels == [-100 if token in firsts else token for token in expected]


def test_documents_as_samples_are_cut_padded_and_each_served_once(folder):
    loader = TokenLoader(folder, 10, 7, samples="documents", mask_document_starts=True)
    assert loader.samples_per_epoch == 60
    rows = {}
    for _ in range(2):
        for _ in range(30):
            batch = loader.next_batch()
            for index, ids, labels in zip(
                *(batch[k].tolist() for k in ("sample_index", "input_ids", "labels")), strict=True
            ):
                rows[index] = (ids, labels)
    firsts = [rows[index][0][0] for index in range(120)]
    assert sorted(firsts[:60]) == sorted(firsts[60:]) == [int(d[0]) for d in DOCUMENTS]
    assert firsts[:60] != firsts[60:]
    by_first = {int(d[0]): [*d.tolist(), 0] for d in DOCUMENTS}
    for ids, labels in rows.values():
        document = by_first[ids[0]][:11]
        assert ids[: len(document)] == document[:10]
        assert labels == document[1:] + [-100] * (11 - len(document))


def test_documents_as_samples_keep_their_order_on_other_ranks(folder):
    def firsts(size, batch_size, workers=0):
        found = {}
        for rank in range(size):
            loader = TokenLoader(folder, 10, batch_size, rank, size, samples="documents", num_workers=workers)
            for _ in range(24 // size // batch_size):
                batch = loader.next_batch()
                found |= dict(zip(batch["sample_index"].tolist(), batch["input_ids"].tolist(), strict=True))
        return found

    assert firsts(1, 4) == firsts(3, 2, workers=1) == firsts(2, 1)


def double(sample):
    return {"twice": sample["input_ids"] * 2, "index": sample["sample_index"]}


def test_a_transform_and_a_collate_of_ones_own(folder):
    plain, changed = TokenLoader(folder, 8, 4), TokenLoader(folder, 8, 4, transform=double)
    batch = changed.next_batch()
    assert torch.equal(batch["twice"], plain.next_batch()["input_ids"] * 2)
    assert batch["index"].tolist() == [0, 1, 2, 3]
    listed = TokenLoader(folder, 8, 4, transform=double, collate=list).next_batch()
    assert [row["index"].item() for row in listed] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_inside_torchs_dataloader_the_order_is_the_same(folder, num_workers):
    loader = TokenLoader(folder, 8, 4)
    expected = [loader.next_batch()["input_ids"] for _ in range(20)]
    fresh = TokenLoader(folder, 8, 4)
    fresh.load_state_dict(fresh.state_dict(samples=8))
    found = DataLoader(fresh, batch_size=None, num_workers=num_workers)
    for have, want in zip(found, expected[2:], strict=False):
        assert torch.equal(have["input_ids"], want)


def test_batches_are_contiguous_int64(folder):
    batch = TokenLoader(folder, 8, 4).next_batch()
    assert {name: (tuple(v.shape), v.dtype, v.is_contiguous()) for name, v in batch.items()} == {
        "input_ids": ((4, 8), torch.int64, True),
        "labels": ((4, 8), torch.int64, True),
        "sample_index": ((4,), torch.int64, True),
    }


@pytest.mark.gpu
def test_batches_arrive_pinned_on_cuda(folder):
    assert TokenLoader(folder, 8, 4).next_batch()["input_ids"].is_pinned()


def test_the_users_random_numbers_are_left_alone(folder):
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(0)
    np.random.seed(0)
    loader = TokenLoader(folder, 8, 4, num_workers=1)
    loader.next_batch()
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])


@pytest.mark.parametrize(("size", "batch_size"), [(1, 4), (2, 4), (3, 5), (4, 1), (7, 3), (100, 2)])
def test_evaluation_serves_every_window_once_and_every_rank_steps_alike(folder, size, batch_size):
    tokens = np.concatenate([np.append(d, 0) for d in DOCUMENTS])
    loaders = [EvaluationLoader(folder, 16, batch_size, rank, size) for rank in range(size)]
    assert loaders[0].num_samples == -(-(len(tokens) - 1) // 16)
    labels, steps = {}, set()
    for loader in loaders:
        batches = list(loader)
        assert len(batches) == len(loader)
        steps.add(len(batches))
        for batch in batches:
            assert 1 <= len(batch["sample_index"]) <= batch_size
            for index, row in zip(batch["sample_index"].tolist(), batch["labels"].tolist(), strict=True):
                assert index not in labels or index == -1
                if index == -1:
                    assert set(row) == {-100}
                else:
                    labels[index] = row
    assert len(steps) == 1
    served = np.concatenate([labels[index] for index in range(loaders[0].num_samples)])
    assert served[served != -100].tolist() == tokens[1:].tolist()


def test_evaluation_of_several_sources_serves_all_of_them(folder, tmp_path):
    write_arrow(tmp_path / "0.arrow", numbered_documents([100, 30], first=5000), delimiter=0)
    loader = EvaluationLoader({"a": folder, "b": str(tmp_path)}, 16, 8)
    labels = torch.cat([batch["labels"].flatten() for batch in loader])
    assert int((labels >= 5000).sum()) == 129
    assert int((labels >= 0).sum()) == sum(len(d) + 1 for d in DOCUMENTS) - 1 + 131
