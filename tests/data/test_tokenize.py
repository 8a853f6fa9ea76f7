"""Text to Arrow: every document once, whatever the format, the number of processes, or the moment of a kill."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_parm.data.tokenize import corpus as tokenize_module
from lightning_parm.data.tokenize import tokenize
from lightning_parm.data.tokenize.processes import run_tasks
from lightning_parm.data.tokenize.text import cut, find_files, read
from lightning_parm.data.tokenize.tokenizer import describe_tokenizer, load_tokenizer, train_bpe

WORDS = ["token", "expert", "router", "ålesund", "数据", "def f(x):\n\treturn x\n", "<|endoftext|>", "🙂", "  ", "\r\n"]


def documents(count: int, seed: int = 0) -> list[str]:
    random = np.random.default_rng(seed)
    return [f"{i}: " + " ".join(random.choice(WORDS, int(random.integers(0, 60)))) for i in range(count)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: t}) + "\n" for i, t in enumerate(texts)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "bpe.json"
    path.write_text(train_bpe(documents(200), vocab_size=400), encoding="utf-8")
    return str(path)


def token_lists(output: Path) -> list[list[int]]:
    lists: list[list[int]] = []
    for file in sorted(output.glob("*.arrow")):
        lists += pa.ipc.open_file(file).read_all().column("tokens").to_pylist()
    return lists


def texts_of(output: Path) -> list[str]:
    bpe = load_tokenizer((output / "tokenizer.json").read_text(encoding="utf-8"))
    return [bpe.decode(tokens, skip_special_tokens=False) for tokens in token_lists(output)]


def checksums(output: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(output.glob("*.arrow"))}


@pytest.mark.parametrize("shard_bytes", [60, 2_000, 2**26])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_every_document_once_in_order(tmp_path: Path, tokenizer: str, kind: str, shard_bytes: int) -> None:
    texts = documents(60 if shard_bytes > 60 else 4)
    if kind == "jsonl":
        write_jsonl(tmp_path / "in.jsonl", texts)
    elif kind == "parquet":
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), tmp_path / "in.parquet", row_group_size=7)
    else:
        (tmp_path / "in").mkdir()
        for i, text in enumerate(texts):
            (tmp_path / "in" / f"{i:03d}.txt").write_bytes(text.encode())
    source = str(tmp_path / ("in" if kind == "text" else f"in.{kind}"))
    summary = tokenize(source, str(tmp_path / "out"), tokenizer, shard_bytes=shard_bytes, num_processes=2)
    assert texts_of(tmp_path / "out") == texts
    assert summary["documents"] == len(texts)
    assert summary["tokens"] == sum(map(len, token_lists(tmp_path / "out")))
    assert summary["shards"] == len(checksums(tmp_path / "out"))
    assert not (tmp_path / "out.partial").exists()


def test_files_follow_the_layout(tmp_path: Path, tokenizer: str) -> None:
    write_jsonl(tmp_path / "in.jsonl", documents(50))
    summary = tokenize(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), tokenizer)
    facts = describe_tokenizer(Path(tokenizer).read_text(encoding="utf-8"))
    with pa.ipc.open_file(tmp_path / "out" / "shard-00000.arrow") as file:
        assert file.schema.names == ["tokens"]
        assert file.schema.field("tokens").type == pa.list_(pa.uint16())
        metadata = {key.decode(): value.decode() for key, value in file.schema.metadata.items()}
    assert metadata["delimiter"] == str(facts.delimiter) == "0"
    assert metadata["vocab_size"] == str(facts.vocab_size) == str(summary["vocab_size"])
    assert metadata["tokenizer_sha256"] == hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()
    # A delimiter spelled out in a document is text: no document can be cut in two by what it says.
    assert not any(facts.delimiter in tokens for tokens in token_lists(tmp_path / "out"))
    assert "/" not in "".join(metadata.values()), "no path of the machine that wrote it"


def test_a_large_vocabulary_takes_uint32(tmp_path: Path) -> None:
    content = json.loads(train_bpe(["some text"], vocab_size=300))
    content["model"]["vocab"]["far"] = 70_000
    (tmp_path / "far.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    summary = tokenize(str(tmp_path / "a.txt"), str(tmp_path / "out"), str(tmp_path / "far.json"))
    assert summary["vocab_size"] > 2**16
    table = pa.ipc.open_file(tmp_path / "out" / "shard-00000.arrow").read_all()
    assert table.schema.field("tokens").type == pa.list_(pa.uint32())


def test_many_record_batches(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_parm.data.tokenize import token_file

    monkeypatch.setattr(token_file, "_BATCH_TOKENS", 500)
    monkeypatch.setattr(token_file, "_ENCODE_BYTES", 1_000)
    texts = documents(80)
    write_jsonl(tmp_path / "in.jsonl", texts)
    tokenize(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), tokenizer)
    assert pa.ipc.open_file(tmp_path / "out" / "shard-00000.arrow").num_record_batches > 4
    assert texts_of(tmp_path / "out") == texts


def test_result_does_not_depend_on_processes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", documents(300))
    sums = []
    for processes in (1, 3):
        out = tmp_path / f"out{processes}"
        tokenize(str(tmp_path / "in.jsonl"), str(out), train_vocab_size=350, shard_bytes=9_000, num_processes=processes)
        sums.append((checksums(out), (out / "tokenizer.json").read_text(encoding="utf-8")))
    assert sums[0] == sums[1]
    assert len(sums[0][0]) > 3


def test_train_on_other_text_gives_one_tokenizer_for_two_sources(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", documents(40, seed=1))
    b = write_jsonl(tmp_path / "b.jsonl", documents(40, seed=2))
    both = [str(a), str(b)]
    first = tokenize(both[0], str(tmp_path / "a"), train_vocab_size=300, train_on=both)
    second = tokenize(both[1], str(tmp_path / "b"), train_vocab_size=300, train_on=both)
    assert first["tokenizer_sha256"] == second["tokenizer_sha256"]
    assert first["digest"] != second["digest"]


def test_running_again_does_nothing_and_other_options_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", documents(50))
    first = tokenize(str(source), str(tmp_path / "out"), train_vocab_size=300)
    before = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()}
    again = tokenize(str(source), str(tmp_path / "out"), train_vocab_size=300)
    assert again == first | {"kept_shards": first["shards"]}
    assert before == {f: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="not made from these inputs with these options"):
        tokenize(str(source), str(tmp_path / "out"), train_vocab_size=310)
    write_jsonl(source, documents(51))
    with pytest.raises(ValueError, match="name another output, or remove it"):
        tokenize(str(source), str(tmp_path / "out"), train_vocab_size=300)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me", encoding="utf-8")
    with pytest.raises(ValueError, match="not made from these inputs"):
        tokenize(str(source), str(tmp_path / "mine"), train_vocab_size=300)
    with pytest.raises(ValueError, match="is a file, and the output must be a folder"):
        tokenize(str(source), str(source), train_vocab_size=300)


CRASH = """
import os, signal, sys
from lightning_parm.data.tokenize import corpus as module
from lightning_parm.data.tokenize import tokenize
def stop(stage, done, total):
    if stage == "tokenizing" and done >= float(sys.argv[4]) * total:
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[5] == "number":
    rename = module.Path.rename
    def killed(self, target):
        rename(self, target)
        if "shard-00002" in str(target):
            os.kill(os.getpid(), signal.SIGKILL)
    module.Path.rename = killed
options = {"train_vocab_size": 350, "shard_bytes": int(sys.argv[3]), "num_processes": 2}
tokenize(sys.argv[1], sys.argv[2], on_progress=stop, **options)
"""


@pytest.mark.parametrize("moment", [0.2, 0.7, "number"])
def test_kill_and_resume(tmp_path: Path, moment: float | str) -> None:
    texts = documents(1_500)
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    shard_bytes = source.stat().st_size // 12
    limit, where = ("2", "number") if moment == "number" else (str(moment), "progress")
    command = [sys.executable, "-c", CRASH, str(source), str(tmp_path / "out"), str(shard_bytes), limit, where]
    killed = subprocess.run(command, timeout=100, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists(), "an output that exists is complete"
    bpe = (tmp_path / "out.partial" / "tokenizer.json").read_bytes()
    summary = tokenize(
        str(source), str(tmp_path / "out"), train_vocab_size=350, shard_bytes=shard_bytes, num_processes=2
    )
    assert summary["kept_shards"] > (11 if moment == "number" else 0)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bpe
    assert texts_of(tmp_path / "out") == texts
    tokenize(str(source), str(tmp_path / "whole"), train_vocab_size=350, shard_bytes=shard_bytes)
    assert checksums(tmp_path / "out") == checksums(tmp_path / "whole")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in (tmp_path / "whole").iterdir()}


def test_undecodable_bytes(tmp_path: Path, tokenizer: str) -> None:
    good, bad = tmp_path / "in" / "a.txt", tmp_path / "in" / "b.txt"
    good.parent.mkdir()
    good.write_text("fine", encoding="utf-8")
    bad.write_bytes(b"one\ntwo \xff\nthree")
    with pytest.raises(ValueError, match=r"b\.txt:2: byte 0xff is not UTF-8 .*errors='replace' or errors='skip'"):
        tokenize(str(tmp_path / "in"), str(tmp_path / "out"), tokenizer)
    assert not (tmp_path / "out").exists()
    tokenize(str(tmp_path / "in"), str(tmp_path / "replaced"), tokenizer, errors="replace")
    assert texts_of(tmp_path / "replaced") == ["fine", "one\ntwo \ufffd\nthree"]
    skipped = tokenize(str(tmp_path / "in"), str(tmp_path / "skipped"), tokenizer, errors="skip")
    assert (skipped["documents"], skipped["skipped_documents"]) == (1, 1)
    assert texts_of(tmp_path / "skipped") == ["fine"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 1}\n", r"in\.jsonl:41: not JSON .*errors='skip'"),
        (b'{"body": "x"}\n', r"in\.jsonl:41: no field 'text', but the fields \['body'\]"),
        (b"[1, 2]\n", r"in\.jsonl:41: no field 'text', but a list"),
        (b'{"text": 5}\n', r"in\.jsonl:41: the field 'text' is a int, not text"),
        (b'{"text": "\xfe"}\n', r"in\.jsonl:41: byte 0xfe is not UTF-8"),
        (b'{"text": "\\ud83d"}\n', r"in\.jsonl:41: '\\ud83d' is half a character"),
    ],
    ids=["json", "field", "list", "number", "utf8", "surrogate"],
)
def test_a_bad_line_is_named_and_loses_nothing(tmp_path: Path, tokenizer: str, line: bytes, message: str) -> None:
    texts = documents(80)
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    other = write_jsonl(tmp_path / "fine.jsonl", texts[:40])
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join([*lines[:40], line, *lines[40:]]))
    call: dict[str, Any] = {"tokenizer": tokenizer, "shard_bytes": 4_000, "num_processes": 1}
    inputs = [str(other), str(source)]
    with pytest.raises(ValueError, match=message + r".*\(\d+ of \d+ shards are finished and stay\.\)"):
        tokenize(inputs, str(tmp_path / "out"), **call)
    finished = len(list((tmp_path / "out.partial").glob("*.arrow")))
    assert finished >= 2
    source.write_bytes(b"".join(lines))
    mended = tokenize(inputs, str(tmp_path / "out"), **call)
    assert mended["kept_shards"] == len(cut([str(other)], 4_000))
    assert texts_of(tmp_path / "out") == texts[:40] + texts
    source.write_bytes(b"".join([*lines[:40], line, *lines[40:]]))
    assert tokenize(inputs, str(tmp_path / "skipped"), errors="skip", **call)["skipped_documents"] == 1
    assert texts_of(tmp_path / "skipped") == texts[:40] + texts


def test_half_a_character_can_be_replaced(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a \\ud83d b"}\n', encoding="utf-8")
    tokenize(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), tokenizer, errors="replace")
    assert texts_of(tmp_path / "out") == ["a \ufffd b"]


def test_parquet_errors(tmp_path: Path, tokenizer: str) -> None:
    out = str(tmp_path / "out")
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet: no column 'text', but \['body', 'n'\]"):
        tokenize(str(tmp_path / "t.parquet"), out, tokenizer)
    with pytest.raises(ValueError, match=r"t\.parquet: column 'n' holds int64, not text"):
        tokenize(str(tmp_path / "t.parquet"), out, tokenizer, text_field="n")
    half = (tmp_path / "t.parquet").read_bytes()[:100]
    (tmp_path / "half.parquet").write_bytes(half)
    with pytest.raises(ValueError, match=r"half\.parquet: not a whole Parquet file"):
        tokenize(str(tmp_path / "half.parquet"), out, tokenizer)
    raw = pa.array([b"fine", None, b"\xff\xfe"], pa.binary())
    pq.write_table(pa.table({"text": raw}), tmp_path / "raw.parquet")
    with pytest.raises(ValueError, match=r"raw\.parquet: row 3: byte 0xff is not UTF-8"):
        tokenize(str(tmp_path / "raw.parquet"), out, tokenizer)
    summary = tokenize(str(tmp_path / "raw.parquet"), out, tokenizer, errors="skip")
    assert (summary["documents"], summary["empty_documents"], summary["skipped_documents"]) == (1, 1, 1)


def test_empty_input(tmp_path: Path, tokenizer: str) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(ValueError, match=r"'.*typo\.txt' matches no file"):
        tokenize(str(tmp_path / "typo.txt"), out, tokenizer)
    (tmp_path / "in").mkdir()
    with pytest.raises(ValueError, match="is a folder without files"):
        tokenize(str(tmp_path / "in"), out, tokenizer)
    (tmp_path / "in" / "empty.txt").touch()
    (tmp_path / "in" / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"no token in .* \(2 files\): 1 documents are empty, 0 were skipped"):
        tokenize(str(tmp_path / "in"), out, tokenizer)
    assert not Path(out).exists()
    (tmp_path / "in" / "full.txt").write_text("something", encoding="utf-8")
    summary = tokenize(str(tmp_path / "in"), out, tokenizer, shard_bytes=1)
    assert (summary["documents"], summary["empty_documents"], summary["shards"]) == (1, 1, 1)
    assert [f.name for f in Path(out).glob("*.arrow")] == ["shard-00000.arrow"]


def test_bad_options(tmp_path: Path, tokenizer: str) -> None:
    source, out = tmp_path / "a.txt", str(tmp_path / "out")
    source.write_text("some text", encoding="utf-8")
    with pytest.raises(ValueError, match="shard_bytes=0 and num_processes=None must be at least 1"):
        tokenize(str(source), out, tokenizer, shard_bytes=0)
    with pytest.raises(ValueError, match="cannot be read as a tokenizer's JSON"):
        tokenize(str(source), out, str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"a\.txt: not the JSON of a `tokenizers` tokenizer"):
        tokenize(str(source), out, str(source))
    with pytest.raises(ValueError, match="has no token <end>; name the one that ends a document"):
        tokenize(str(source), out, tokenizer, end_of_text="<end>")
    with pytest.raises(ValueError, match="vocab_size=100 is below 257"):
        tokenize(str(source), out, train_vocab_size=100)


def test_missing_library_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'lightning-parm[cli]'")):
        tokenize(str(tmp_path), str(tmp_path / "out"))


def test_output_below_the_input_is_not_read_as_input(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    for _ in range(2):
        assert tokenize(str(tmp_path), str(tmp_path / "out"), tokenizer)["documents"] == 1


def test_files_are_found_once_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden.txt", "sub/c.md", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    found = find_files([str(tmp_path / "*.txt"), str(tmp_path)])
    assert [os.path.relpath(file, tmp_path) for file in found] == ["a.txt", "b.txt", "sub/c.md"]


def test_editing_one_file_leaves_other_shards_alone(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text("x" * 1_000, encoding="utf-8")
    before = cut(find_files(str(tmp_path)), 4_500)
    (tmp_path / "05.txt").write_text("x" * 1_003, encoding="utf-8")
    after = cut(find_files(str(tmp_path)), 4_500)
    assert len(set(before) - set(after)) == 1
    assert [part.path for shard in after for part in shard] == [part.path for shard in before for part in shard]


def test_lines_are_cut_at_every_byte_without_loss(tmp_path: Path) -> None:
    texts = ["a", "", "bc", "def"]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(json.dumps({"text": t}).encode() for t in texts))
    for shard_bytes in range(1, path.stat().st_size + 2):
        shards = cut([str(path)], shard_bytes)
        assert [text for shard in shards for part in shard for text in read(part, "text", "strict")] == texts


def test_a_second_run_waits_and_then_says_so(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", documents(5))
    alone = tokenize_module._alone_in
    monkeypatch.setattr(tokenize_module, "_alone_in", lambda folder: alone(folder, patience_seconds=0.3))
    with (
        alone(tmp_path / "out.partial"),
        pytest.raises(TimeoutError, match=r"another run is writing .*out\.partial: wait for it"),
    ):
        tokenize(str(source), str(tmp_path / "out"), tokenizer)
    assert tokenize(str(source), str(tmp_path / "out"), tokenizer)["documents"] == 5


def test_processes_die_with_their_parent(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys, time\n"
        "from lightning_parm.data.tokenize.processes import run_tasks\n"
        "def task(name, report):\n"
        "    pathlib.Path(name).write_text(str(os.getpid()))\n"
        "    while True:\n"
        "        time.sleep(0.02); report(1)\n"
        "run_tasks(sys.argv[1:], task, 2, lambda amount: None)\n"
    )
    names = [tmp_path / "a", tmp_path / "b"]
    parent = subprocess.Popen([sys.executable, "-c", program, *map(str, names)])
    deadline = time.monotonic() + 60
    while not all(name.exists() and name.read_text() for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = [int(name.read_text()) for name in names]
    parent.kill()
    parent.wait()
    while any(
        Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes() for child in children
    ):
        assert time.monotonic() < deadline, "the children outlived their parent"
        time.sleep(0.05)


def test_failures_of_a_process_reach_the_caller() -> None:
    def die(task: int, report: Any) -> int:
        if task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    def fail(task: int, report: Any) -> int:
        raise KeyError("gone") if task else ValueError("not this one")

    assert run_tasks([0, 2, 3], die, 2, lambda amount: None) == [0, 2, 3]
    with pytest.raises(RuntimeError, match="ended with exit code -9 before its work was done"):
        run_tasks([0, 1], die, 1, lambda amount: None)
    with pytest.raises(RuntimeError, match="KeyError: 'gone'"):
        run_tasks([1], fail, 1, lambda amount: None)
    with pytest.raises(ValueError, match="not this one"):
        run_tasks([0, 0], fail, 1, lambda amount: None)


def test_trained_tokenizer_round_trips_any_text() -> None:
    content = train_bpe(documents(100), vocab_size=350)
    assert content == train_bpe(documents(100), vocab_size=350)
    bpe = load_tokenizer(content)
    text = "Ünseen 文字 \x00\t 🙂 <|endoftext|> def g():\r\n    pass\n"
    assert bpe.decode(bpe.encode(text).ids, skip_special_tokens=False) == text
    assert describe_tokenizer(content).delimiter == 0
