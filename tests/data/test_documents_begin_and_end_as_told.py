"""What is put around documents and which are left out: in windows, in documents as samples, and in the state."""

from __future__ import annotations

import logging
from collections import Counter

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.data import EvaluationLoader, TokenLoader, open_sources

BOS, END = 70_000, 70_001
LENGTHS = [*random_lengths(3, 80, 12), 1, 2, 300, 1]
DOCUMENTS = numbered_documents(LENGTHS)
READY = [np.append(BOS, DOCUMENTS[0]), np.append(DOCUMENTS[1], END), np.concatenate([[BOS], DOCUMENTS[2], [END]])]
AROUND = [{}, {"bos": BOS}, {"delimiter": END}, {"bos": BOS, "delimiter": END}, {"bos": BOS, "delimiter": BOS}]


@pytest.fixture
def folder(tmp_path):
    """Make a corpus in which some documents have what is to be put around them already, and one is nothing else."""
    ready = [document.astype("uint32") for document in READY]
    write_arrow(tmp_path / "data" / "0.arrow", [*ready, np.array([BOS], "uint32"), *DOCUMENTS[3:]], rows_per_batch=7)
    return tmp_path / "data"


def expected(bos=None, delimiter=None, min_document_length=1):
    """Return the documents as they have to be served."""
    kept = []
    for document in [*READY, np.array([BOS]), *DOCUMENTS[3:]]:
        tokens = document.tolist()
        tokens = tokens[tokens[0] == bos :]
        tokens = tokens[: len(tokens) - (tokens[-1:] == [delimiter])]
        if len(tokens) >= min_document_length:
            kept.append([t for t in (bos,) if t is not None] + tokens + [t for t in (delimiter,) if t is not None])
    return kept


def epoch(path, size=1, **options):
    """Return the tokens of the first epoch of a single logical shard, in order, read by ``size`` ranks."""
    ranks = [TokenLoader(str(path), 1, 1, rank, size, num_logical_shards=1, **options) for rank in range(size)]
    total, served = ranks[0].sources[0].num_tokens, {}
    for step in range(-(-total // size)):
        for loader in ranks:
            batch = loader.next_batch()
            served[batch["sample_index"].item()] = batch["input_ids"].item()
        if step == total // size // 2:  # a rescale to one rank in the middle
            resumed = TokenLoader(str(path), 1, 1, num_logical_shards=1, **options)
            resumed.load_state_dict(ranks[0].state_dict())
            ranks = [resumed]
            break
    while len(served) < total:
        batch = ranks[0].next_batch()
        served[batch["sample_index"].item()] = batch["input_ids"].item()
    return [served[sample] for sample in range(total)]


@pytest.mark.parametrize("around", AROUND, ids=str)
@pytest.mark.parametrize("shortest", [1, 4])
def test_a_ledger_of_all_tokens(folder, around, shortest):
    whole = expected(**around, min_document_length=shortest)
    served = epoch(folder, size=3, **around, min_document_length=shortest)
    assert Counter(served) == Counter(token for document in whole for token in document)
    if around.get("bos") and around.get("bos") != around.get("delimiter"):  # documents stay whole and in one piece
        starts = [place for place, token in enumerate(served) if token == BOS]
        pieces = [served[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        assert sorted(pieces) == sorted(whole)


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_windows_cut_the_same_stream_wherever_they_cut(folder, around):
    stream = [token for document in expected(**around) for token in document]
    for length in (1, 3, 16, 64):
        loader = TokenLoader(str(folder), length, 1, num_logical_shards=1, shuffle=False, **around)
        rows = [loader.next_batch() for _ in range((len(stream) - 1) // length)]
        assert [token for row in rows for token in row["input_ids"][0].tolist()] == stream[: len(rows) * length]
        assert [row["labels"][0, -1].item() for row in rows] == stream[length::length][: len(rows)]


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_documents_as_samples_begin_and_end_as_told(folder, around):
    whole = [document for document in expected(**around, min_document_length=2) if len(document) > 1]
    loader = EvaluationLoader(str(folder), 350, 1, samples="documents", min_document_length=2, **around)
    for document, batch in zip(whole, loader, strict=True):
        assert batch["input_ids"][0, : len(document)].tolist() == document[:350]
        assert batch["labels"][0, : len(document) - 1].tolist() == document[1:]
        assert (batch["labels"][0, len(document) - 1 :] == -100).all()


def test_positions_start_at_the_token_before_each_document(folder):
    loader = TokenLoader(str(folder), 32, 4, bos=BOS, delimiter=END, position_ids=True, mask_document_starts=True)
    for _ in range(5):
        batch = loader.next_batch()
        assert (batch["position_ids"][batch["input_ids"] == BOS] == 0).all()
        assert not (batch["labels"] == BOS).any()
        assert (batch["labels"] == -100).any()


def test_decoded_and_remote_parts_too(tmp_path):
    table = pa.table({"input_ids": pa.array([d.tolist() for d in DOCUMENTS], type=pa.list_(pa.uint32()))})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=30)
    files = fsspec.filesystem("memory")
    np.save(tmp_path / "0.npy", np.concatenate([np.append(d, END) for d in DOCUMENTS]).astype(np.uint32))
    files.pipe_file("/begins/0.npy", (tmp_path / "0.npy").read_bytes())
    around = {"bos": BOS, "delimiter": END, "cache_folder": str(tmp_path / "cache")}
    served = epoch(tmp_path / "0.parquet", **around)
    assert Counter(served) == Counter(t for d in DOCUMENTS for t in (BOS, *d.tolist(), END))
    assert Counter(epoch("memory://begins/0.npy", **around)) == Counter(served)
    files.rm("/begins", recursive=True)


def test_short_documents_are_counted_and_logged(folder, caplog):
    with caplog.at_level(logging.INFO):
        (source,) = open_sources(str(folder), min_document_length=5)
    short = sum(length < 5 for length in [len(d) for d in [*READY, [BOS], *DOCUMENTS[3:]]])
    assert source.num_short == short > 10
    assert f"Source 'data': left out {short} of {len(DOCUMENTS) + 1} documents" in caplog.text


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ({}, {"bos": BOS}, "bos=None and the loader has bos=70000.*other tokens"),
        ({"bos": BOS}, {"bos": BOS + 1}, "bos=70000 and the loader has bos=70001"),
        ({}, {"min_document_length": 3}, "min_document_length=1 and the loader has min_document_length=3.*left out"),
        (
            {"delimiter": END},
            {"delimiter": END + 1},
            "has the delimiter 70002 where the checkpoint's had the delimiter",
        ),
        ({"delimiter": END}, {}, "has no delimiter where the checkpoint's had the delimiter 70001"),
        ({"bos": BOS}, {"delimiter": BOS}, "bos=70000 and the loader has bos=None"),
    ],
)
def test_a_checkpoint_of_documents_served_otherwise_says_what_differs(folder, was, now, message):
    state = TokenLoader(str(folder), 8, 1, **was).state_dict()
    TokenLoader(str(folder), 8, 1, **was).load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        TokenLoader(str(folder), 8, 1, **now).load_state_dict(state)


def test_arguments_out_of_range(folder):
    with pytest.raises(ValueError, match="min_document_length=0 must be at least 1"):
        TokenLoader(str(folder), 8, 1, min_document_length=0)
    with pytest.raises(ValueError, match="bos=-1 is no token"):
        TokenLoader(str(folder), 8, 1, bos=-1)
    with pytest.raises(ValueError, match="delimiter=-1 is no token"):
        TokenLoader(str(folder), 8, 1, delimiter=-1)
    with pytest.raises(ValueError, match="0 tokens in 0 documents"):
        TokenLoader(str(folder), 8, 1, min_document_length=1000)
