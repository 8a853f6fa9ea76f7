"""Every format gives the same documents as the arrays it was written from, and bad files are named."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.data import TokenLoader
from lightning_parm.data.sources.registry import open_sources

END = 0
DOCUMENTS = numbered_documents(random_lengths(3, 120, 40), dtype="uint16")


def one_batch_a_document(folder: Path) -> None:
    """Write as IBM's fms-fsdp expects: a plain integer column, one record batch a document."""
    schema = pa.schema([pa.field("tokens", pa.uint32())])
    with pa.OSFile(str(folder / "0.arrow"), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for document in DOCUMENTS:
            writer.write_batch(pa.record_batch([pa.array(document.astype("uint32"))], schema=schema))


def list_rows(folder: Path) -> None:
    write_arrow(folder / "0.arrow", DOCUMENTS[:50])
    write_arrow(folder / "1.arrow", DOCUMENTS[50:], rows_per_batch=7)


def hugging_face(folder: Path) -> None:
    """Write as ``datasets`` saves: streams in an order that only state.json knows, columns besides the tokens."""
    parts = {"z.arrow": DOCUMENTS[:70], "a.arrow": DOCUMENTS[70:]}
    for name, documents in parts.items():
        table = pa.table({"text": ["x"] * len(documents), "input_ids": [d.astype("int32") for d in documents]})
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in parts], "_fingerprint": "f"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def parquet(folder: Path) -> None:
    table = pa.table({"input_ids": pa.array([d.tolist() for d in DOCUMENTS], type=pa.list_(pa.int64()))})
    pq.write_table(table, folder / "0.parquet", row_group_size=17)


def megatron(folder: Path) -> None:
    """Write documents of up to two sequences each."""
    np.concatenate(DOCUMENTS).tofile(folder / "0.bin")
    sizes, bounds = [], [0]
    for document in DOCUMENTS:
        cut = [len(document) // 2, len(document) - len(document) // 2] if len(document) > 20 else [len(document)]
        sizes += cut
        bounds.append(len(sizes))
    pointers = 2 * (np.cumsum(sizes) - sizes)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(bounds))
    arrays = [np.array(sizes, np.int32), pointers.astype(np.int64), np.array(bounds, np.int64)]
    (folder / "0.idx").write_bytes(header + b"".join(a.tobytes() for a in arrays))


def joined() -> np.ndarray:
    return np.concatenate([np.append(d, END) for d in DOCUMENTS]).astype(np.uint16)


def npy(folder: Path) -> None:
    np.save(folder / "0.npy", joined())


def raw(folder: Path) -> None:
    joined().tofile(folder / "0.bin")


def llmc(folder: Path) -> None:
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(joined())
    (folder / "0.bin").write_bytes(header.tobytes() + joined().tobytes())


def litdata(folder: Path) -> None:
    """Write one chunk a file: count, offsets in bytes, tokens (type 16 of litdata's table is int64)."""
    chunks = []
    for number, documents in enumerate((DOCUMENTS[:90], DOCUMENTS[90:])):
        offsets = 4 * (len(documents) + 2) + 8 * np.cumsum([0] + [len(d) for d in documents])
        body = b"".join(d.astype(np.int64).tobytes() for d in documents)
        content = np.array([len(documents), *offsets], np.uint32).tobytes() + body
        (folder / f"chunk-0-{number}.bin").write_bytes(content)
        chunks.append({"filename": f"chunk-0-{number}.bin"})
    config = {"item_loader": "TokensLoader", "data_format": ["no_header_tensor:16"], "compression": None}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


WRITERS = [one_batch_a_document, list_rows, hugging_face, parquet, megatron, npy, raw, llmc, litdata]


def read_back(folder: Path, **options) -> list[list[int]]:
    """Return the documents in the order of the files, delimiters included."""
    loader = TokenLoader(str(folder), 8, 1, shuffle=False, num_logical_shards=1, delimiter=END, **options)
    tokens, windows = [], loader.sources[0].num_tokens // 8
    for _ in range(windows):
        tokens += loader.next_batch()["input_ids"].flatten().tolist()
    bounds = [0, *(np.flatnonzero(np.array(tokens) == END) + 1).tolist()]
    return [tokens[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("write", WRITERS)
def test_documents_come_back_in_order(tmp_path, write):
    write(tmp_path)
    options = {"dtype": "uint16"} if write is raw else {}
    documents = read_back(tmp_path, **options)
    assert documents == [[*d.tolist(), END] for d in DOCUMENTS[: len(documents)]]
    assert len(documents) >= len(DOCUMENTS) - 1  # the last window may not be full


@pytest.mark.parametrize("write", WRITERS)
def test_shuffled_epochs_hold_the_same_tokens(tmp_path, write):
    write(tmp_path)
    options = {"dtype": "uint16"} if write is raw else {}
    loader = TokenLoader(str(tmp_path), 1, 1, delimiter=END, num_logical_shards=1, **options)
    served = [loader.next_batch()["input_ids"].item() for _ in range(loader.sources[0].num_tokens)]
    assert sorted(served) == sorted(joined().tolist())
    assert served != joined().tolist()


def test_a_matrix_is_one_document_a_row(tmp_path):
    np.save(tmp_path / "0.npy", np.arange(1, 101, dtype=np.uint32).reshape(10, 10))
    source = open_sources(str(tmp_path), delimiter=END)[0]
    assert (source.num_documents, source.num_tokens) == (10, 110)


@pytest.mark.parametrize(("others", "before"), [([], 0), (["int:8"], 1)])
def test_mosaic_shards(tmp_path, others, before):
    """Fixed columns are read in place; 'int' columns of 8 bytes before the tokens are stepped over."""
    rows = np.arange(1, 481, dtype=np.uint16).reshape(30, 16)
    sizes = [8] * len(others) + [32]
    size = sum(sizes)
    offsets = 4 * (30 + 2) + size * np.arange(31)
    body = b"".join(b"\x07" * 8 * len(others) + row.tobytes() for row in rows)
    (tmp_path / "shard.00000.mds").write_bytes(np.array([30, *offsets], np.uint32).tobytes() + body)
    names = ["n"] * len(others) + ["tokens"]
    encodings = ["int"] * len(others) + ["ndarray:uint16:16"]
    shard = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes, "compression": None}
    shard |= {"raw_data": {"basename": "shard.00000.mds"}, "zip_data": None, "samples": 30, "format": "mds"}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    loader = TokenLoader(str(tmp_path), 16, 1, shuffle=False)
    assert [loader.next_batch()["input_ids"].tolist() for _ in range(30)] == [[row.tolist()] for row in rows]
    shard["compression"] = "zstd"
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    with pytest.raises(ValueError, match="is compressed with zstd"):
        TokenLoader(str(tmp_path), 16, 1)


@pytest.mark.parametrize(
    ("encodings", "sizes", "message"),
    [
        (["str", "ndarray:uint16:16"], [None, 32], "has no column of token arrays of a fixed size"),
        (["uint8", "ndarray:uint16:16"], [1, 32], "do not start at whole uint16 tokens"),
    ],
)
def test_mosaic_shards_that_cannot_be_read_in_place(tmp_path, encodings, sizes, message):
    size = sum(size or 0 for size in sizes)
    offsets = 4 * (3 + 2) + size * np.arange(4)
    (tmp_path / "s.mds").write_bytes(np.array([3, *offsets], np.uint32).tobytes() + b"\x01" * 3 * size)
    shard = {"column_names": ["x", "tokens"], "column_encodings": encodings, "column_sizes": sizes}
    shard |= {"raw_data": {"basename": "s.mds"}, "compression": None, "zip_data": None}
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [shard]}))
    with pytest.raises(ValueError, match=message):
        open_sources(str(tmp_path))


def test_a_hugging_face_folder_honours_its_indices(tmp_path):
    hugging_face(tmp_path)
    chosen = [5, 3, 3, 100]
    table = pa.table({"indices": pa.array(chosen, type=pa.uint64())})
    with pa.OSFile(str(tmp_path / "indices.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    state = json.loads((tmp_path / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "state.json").write_text(json.dumps(state))
    source = open_sources(str(tmp_path))[0]
    assert source.kept.tolist() == [len(DOCUMENTS[row]) for row in sorted(chosen)]


def test_a_folder_of_splits_asks_for_one(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"holds several splits \(train, test\)"):
        open_sources({"a": str(tmp_path)})


def test_documents_that_end_with_the_delimiter_get_no_second_one(tmp_path):
    write_arrow(tmp_path / "0.arrow", [np.append(d, END).astype("uint16") for d in DOCUMENTS[:60]] + DOCUMENTS[60:])
    assert read_back(tmp_path)[:100] == [[*d.tolist(), END] for d in DOCUMENTS[:100]]


def test_a_delimiter_larger_than_the_type_widens_it(tmp_path):
    write_arrow(tmp_path / "0.arrow", DOCUMENTS, delimiter=100_000)
    batch = TokenLoader(str(tmp_path), 200, 1).next_batch()
    assert 100_000 in batch["input_ids"]


class PairsFormat:
    """A user's own format: text files with one document of comma-separated numbers a line."""

    name = "pairs"
    decodes_parts = False

    def matches(self, path):
        return path.suffix == ".txt"

    def index(self, path, delimiter):
        from lightning_parm.data.sources.format import FileIndex

        lengths = np.array([line.count(",") + 1 for line in path.read_text().splitlines()])
        return FileIndex(lengths, np.cumsum(lengths) - lengths, "uint16")

    def open(self, path, part):
        return np.array(path.read_text().replace("\n", ",").strip(",").split(","), dtype=np.uint16)


def test_a_format_of_ones_own_is_an_object_or_a_name(tmp_path, monkeypatch):
    (tmp_path / "0.txt").write_text("".join(",".join(map(str, d.tolist())) + "\n" for d in DOCUMENTS))
    documents = read_back(tmp_path, format=PairsFormat())
    assert documents[:100] == [[*d.tolist(), END] for d in DOCUMENTS[:100]]
    monkeypatch.setitem(__import__("sys").modules, "my_formats", __import__("types").SimpleNamespace(Pairs=PairsFormat))
    assert read_back(tmp_path, format="my_formats.Pairs") == documents


@pytest.mark.parametrize(
    ("write", "damage", "message"),
    [
        (parquet, lambda f: truncate(f / "0.parquet"), "is not a complete Parquet file"),
        (npy, lambda f: truncate(f / "0.npy"), "is not a complete .npy file"),
        (npy, lambda f: np.save(f / "0.npy", np.zeros(9)), "holds float64 of shape"),
        (raw, lambda f: (f / "0.bin").write_bytes(b"123"), "3 bytes, which is no whole number of uint16"),
        (llmc, lambda f: truncate(f / "0.bin"), "is truncated: its header says"),
        (megatron, lambda f: truncate(f / "0.bin"), "is truncated: its documents need"),
        (megatron, lambda f: truncate(f / "0.idx"), "has a truncated .idx"),
        (litdata, lambda f: truncate(f / "chunk-0-0.bin"), "its table of offsets points past its end"),
        (litdata, lambda f: edit(f / "index.json", '"TokensLoader"', '"PyTreeLoader"'), "is not plain tokens"),
        (litdata, lambda f: edit(f / "index.json", "tensor:16", "tensor:1"), "not integer tensors without headers"),
        (megatron, lambda f: poke(f / "0.idx", 9, 2), "has an .idx of version 2 with type code 8"),
        (megatron, lambda f: poke(f / "0.idx", 17, 6), "has an .idx of version 1 with type code 6"),
        (megatron, lambda f: poke(f / "0.idx", 34, 1), "has sequences in another order than its .idx"),
        (parquet, lambda f: write_rows(f / "0.parquet", [1, 2]), "has one integer a row in column 'tokens'"),
        (parquet, lambda f: write_rows(f / "0.parquet", [[1], None]), "has 1 rows without a value"),
        (parquet, lambda f: write_rows(f / "0.parquet", [[1, None]]), "has 1 tokens without a value"),
        (list_rows, lambda f: write_floats(f / "0.arrow"), "has no column of tokens"),
        (list_rows, lambda f: (f / "0.arrow").write_bytes(b""), r"is empty \(0 bytes\)"),
        (list_rows, lambda f: write_nulls(f / "0.arrow"), "rows without a value"),
        (list_rows, lambda f: write_compressed(f / "0.arrow"), "has compressed buffers"),
    ],
)
def test_bad_files_are_named_with_what_is_wrong(tmp_path, write, damage, message):
    write(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_sources(str(tmp_path), delimiter=END, dtype="uint16" if write is raw else None)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def poke(path: Path, place: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] = value
    path.write_bytes(content)


def write_rows(path: Path, rows: list) -> None:
    pq.write_table(pa.table({"tokens": rows}), path)


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def write_table(path: Path, table: pa.Table, **options) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, **options) as writer:
        writer.write_table(table)


def write_floats(path: Path) -> None:
    write_table(path, pa.table({"x": [1.0, 2.0]}))


def write_nulls(path: Path) -> None:
    write_table(path, pa.table({"tokens": pa.array([[1, 2], None], type=pa.list_(pa.uint16()))}))


def write_compressed(path: Path) -> None:
    table = pa.table({"tokens": pa.array([[1] * 5000], type=pa.list_(pa.uint16()))})
    write_table(path, table, options=pa.ipc.IpcWriteOptions(compression="zstd"))


def test_several_formats_in_one_folder_are_refused(tmp_path):
    npy(tmp_path)
    list_rows(tmp_path)
    with pytest.raises(ValueError, match=r"mixes formats \(2 arrow, 1 npy\)"):
        open_sources(str(tmp_path))
    assert open_sources(str(tmp_path), format="npy")[0].format.name == "npy"


def test_arguments_that_name_no_format(tmp_path):
    with pytest.raises(ValueError, match="format='csv' is neither one of arrow, parquet"):
        open_sources(str(tmp_path), format="csv")
    with pytest.raises(ValueError, match="dtype='float32' is not an integer type"):
        open_sources(str(tmp_path), dtype="float32")
    list_rows(tmp_path)
    with pytest.raises(ValueError, match='bad_files=\'ignore\' must be "raise" or "skip"'):
        open_sources(str(tmp_path), bad_files="ignore")


def test_an_fms_folder_is_a_mix_and_its_counts_are_checked(tmp_path, caplog):
    for name in ("code", "web"):
        (tmp_path / name).mkdir()
        one_batch_a_document(tmp_path / name)
    (tmp_path / "meta").mkdir()
    rows = "dataset/filename,documents,tokens\n/code/0.arrow,120,9\n/web/0.arrow,7,9\n"
    (tmp_path / "meta" / "combined_counts.csv").write_text(rows)
    loader = TokenLoader(str(tmp_path), 32, 1, weights={"code": 1, "web": 1}, delimiter=END)
    assert [source.name for source in loader.sources] == ["code", "web"]
    assert [r.message for r in caplog.records] == [
        f"{tmp_path}/meta/combined_counts.csv says 7 documents for web/0.arrow, which has 120; the file is trusted, "
        "not the table."
    ]
