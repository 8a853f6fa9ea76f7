"""Corpora that hang or crash other loaders: every token is served once an epoch, or the error says what is wrong."""

from __future__ import annotations

import time

import numpy as np
import pytest
from data.corpora import numbered_documents, write_arrow

from lightning_parm.data import TokenLoader, open_sources

EMPTY = np.array([], dtype="uint32")
DOCUMENTS = numbered_documents([30] * 99)


def epoch(folder, size=1, batch_size=1):
    """Return all tokens of the first epoch of a single logical shard, read by ``size`` ranks."""
    ranks = [TokenLoader(str(folder), 1, batch_size, r, size, num_logical_shards=1) for r in range(size)]
    total = ranks[0].sources[0].num_tokens
    served = {}
    for _ in range(-(-total // (size * batch_size))):
        for loader in ranks:
            batch = loader.next_batch()
            served |= dict(zip(batch["sample_index"].tolist(), batch["input_ids"][:, 0].tolist(), strict=True))
    return sorted(served[sample] for sample in range(total))


def expected(documents):
    return sorted(token for d in documents if len(d) for token in [*d.tolist(), 0])


@pytest.mark.parametrize(
    ("documents", "size"),
    [
        ([*DOCUMENTS[:50], EMPTY, *DOCUMENTS[50:]], 1),
        ([EMPTY, DOCUMENTS[0], EMPTY, EMPTY], 3),
        (numbered_documents([1] * 200), 2),
        (numbered_documents([5000]), 4),
        (numbered_documents([40, 1, 3]), 8),
    ],
    ids=["one empty of a hundred", "mostly empty", "all of one token", "one document", "fewer documents than ranks"],
)
def test_every_token_once(tmp_path, documents, size):
    write_arrow(tmp_path / "0.arrow", documents, delimiter=0)
    assert epoch(tmp_path, size) == expected(documents)


def test_files_without_documents_between_others(tmp_path):
    write_arrow(tmp_path / "0.arrow", DOCUMENTS[:40], delimiter=0)
    write_arrow(tmp_path / "1.arrow", [], delimiter=0)
    write_arrow(tmp_path / "2.arrow", DOCUMENTS[40:], delimiter=0)
    write_arrow(tmp_path / "3.arrow", [EMPTY, EMPTY], delimiter=0)
    assert epoch(tmp_path) == expected(DOCUMENTS)


def test_nothing_but_empty_documents(tmp_path):
    write_arrow(tmp_path / "0.arrow", [EMPTY] * 10, delimiter=0)
    with pytest.raises(ValueError, match="0 tokens in 0 documents, less than one window"):
        TokenLoader(str(tmp_path), 8, 1)
    with pytest.raises(ValueError, match="no document with a token in it"):
        TokenLoader(str(tmp_path), 8, 1, samples="documents")


def test_a_document_of_a_million_tokens_among_small_ones(tmp_path):
    documents = numbered_documents([10] * 20 + [1_000_000] + [10] * 20)
    write_arrow(tmp_path / "0.arrow", documents, delimiter=0)
    loader = TokenLoader(str(tmp_path), 1000, 10, num_logical_shards=8)
    assert loader.order.readers[0].num_shards == 8
    steps = loader.samples_per_epoch // 10
    tokens = np.concatenate([loader.next_batch()["input_ids"].numpy().flatten() for _ in range(steps)])
    tokens = tokens[tokens > 0]
    assert len(np.unique(tokens)) == len(tokens)
    assert len(tokens) > 0.98 * 1_000_400


def test_two_thousand_files_open_quickly_the_second_time(tmp_path, monkeypatch):
    documents = numbered_documents([30] * 2000)
    for number, document in enumerate(documents):
        write_arrow(tmp_path / f"{number // 100}" / f"{number}.arrow", [document], delimiter=0)
    first = open_sources({"all": str(tmp_path)})[0]
    assert (len(first.index.names), first.num_documents) == (2000, 2000)
    monkeypatch.setattr("lightning_parm.data.sources.index._build", None)  # the second time needs no look into files
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        loader = TokenLoader({"all": str(tmp_path)}, 16, 8)
        loader.next_batch()
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1
    second = loader.sources[0]
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.ends, first.ends)


def test_hidden_and_broken_files_are_no_part_of_a_folder(tmp_path):
    write_arrow(tmp_path / "data" / "deep" / "0.arrow", DOCUMENTS, delimiter=0)
    for name in (".hidden/1.arrow", "_temporary/2.arrow", "deep/.3.arrow", "deep/_4.arrow"):
        write_arrow(tmp_path / "data" / name, DOCUMENTS, delimiter=0)
    (tmp_path / "data" / "deep" / "5.arrow").symlink_to(tmp_path / "nowhere")
    for _ in range(2):
        sources = open_sources(str(tmp_path / "data"), cache_folder=str(tmp_path / "data" / "cache"))
        assert [(source.name, source.index.names) for source in sources] == [("deep", ("0.arrow",))]


def test_a_changed_file_is_indexed_again_and_a_broken_index_made_anew(tmp_path, caplog):
    write_arrow(tmp_path / "d" / "0.arrow", DOCUMENTS, delimiter=0)
    cache = tmp_path / "cache"
    assert open_sources(str(tmp_path / "d"), cache_folder=str(cache))[0].num_documents == 99
    write_arrow(tmp_path / "d" / "0.arrow", DOCUMENTS[:50], delimiter=0)
    assert open_sources(str(tmp_path / "d"), cache_folder=str(cache))[0].num_documents == 50
    for file in (cache / "_index").iterdir():
        file.write_bytes(b"broken")
    assert open_sources(str(tmp_path / "d"), cache_folder=str(cache))[0].num_documents == 50
    (tmp_path / "file").touch()
    assert open_sources(str(tmp_path / "d"), cache_folder=str(tmp_path / "file"))[0].num_documents == 50
    assert "is not kept" in caplog.text
