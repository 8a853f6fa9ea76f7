"""Sources behind URLs: fsspec's memory file system, and a web server of this machine that can be made to fail."""

from __future__ import annotations

import functools
import http.server
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from data.corpora import numbered_documents, random_lengths, write_arrow

from lightning_parm.data import TokenLoader, open_sources
from lightning_parm.data.sources import index, places
from lightning_parm.data.sources.cache import DiskCache

DOCUMENTS = numbered_documents(random_lengths(0, 300, 60))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make three files, cut into parts of about 1000 tokens."""
    monkeypatch.setattr(index, "PART_TOKENS", 1000)
    monkeypatch.setattr(places, "_FIRST_PAUSE_SECONDS", 0.001)
    for file in range(3):
        write_arrow(tmp_path / "data" / f"{file}.arrow", DOCUMENTS[file * 100 : (file + 1) * 100], delimiter=0)
    return tmp_path / "data"


@pytest.fixture
def memory(folder):
    files = fsspec.filesystem("memory")
    for path in folder.iterdir():
        files.pipe_file(f"/corpus/{path.name}", path.read_bytes())
    yield "memory://corpus"
    files.rm("/corpus", recursive=True)


def batches(loader, count=60):
    return [loader.next_batch()["input_ids"].tolist() for _ in range(count)]


def options(tmp_path, name="cache", **more):
    return {"sequence_length": 32, "batch_size": 4, "cache_folder": str(tmp_path / name), **more}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_order_is_that_of_the_same_files_on_disk(tmp_path, folder, memory, num_workers):
    local = TokenLoader(str(folder), **options(tmp_path))
    remote = TokenLoader(memory, **options(tmp_path, num_workers=num_workers))
    assert batches(local) == batches(remote)
    remote.load_state_dict(local.state_dict(samples=40))  # moving the data is no change, in either direction
    assert remote.state_dict()["digest"] is None


def test_other_formats_come_over_the_network_too(tmp_path, folder):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = fsspec.filesystem("memory")
    table = pa.table({"input_ids": pa.array([d.tolist() for d in DOCUMENTS], type=pa.list_(pa.uint32()))})
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=40)
    files.pipe_file("/groups/0.parquet", (tmp_path / "0.parquet").read_bytes())
    np.save(tmp_path / "0.npy", np.concatenate([np.append(d, 0) for d in DOCUMENTS]).astype(np.uint32))
    files.pipe_file("/flat/0.npy", (tmp_path / "0.npy").read_bytes())
    for url, path in (("memory://groups/*.parquet", "0.parquet"), ("memory://flat/0.npy", "0.npy")):
        here = TokenLoader(str(tmp_path / path), delimiter=0, **options(tmp_path))
        assert batches(TokenLoader(url, delimiter=0, **options(tmp_path))) == batches(here)


def test_the_cache_stays_within_its_limit_and_every_part_is_readable_again(tmp_path, folder, memory):
    limit = 20_000
    loader = TokenLoader(memory, **options(tmp_path, cache_bytes=limit))
    local = TokenLoader(str(folder), **options(tmp_path))
    for _ in range(50):
        assert loader.next_batch()["input_ids"].tolist() == local.next_batch()["input_ids"].tolist()
    assert loader.wait_seconds > 0
    del loader  # ends its thread
    kept = [path.stat().st_size for path in (tmp_path / "cache" / "_parts").iterdir() if path.name[0] != "."]
    assert 0 < sum(kept) <= limit


def test_ranks_of_a_machine_share_what_one_of_them_fetched(tmp_path, memory, monkeypatch):
    fetched = []
    read = places.RemotePlace.read

    def counted(self, name, start, stop):
        fetched.append((name, start))
        return read(self, name, start, stop)

    monkeypatch.setattr(places.RemotePlace, "read", counted)
    for rank in range(3):
        batches(TokenLoader(memory, rank=rank, size=3, **options(tmp_path)), 100)
    assert len(fetched) == len(set(fetched)) > 10


def test_two_threads_ask_for_one_key_and_one_produces(tmp_path):
    produced, barrier = [], threading.Barrier(2)

    def produce(path: Path) -> None:
        produced.append(path)
        path.write_bytes(b"x" * 10)

    def ask() -> None:
        barrier.wait()
        assert DiskCache(tmp_path, 1000).fetch("key", produce, Path.read_bytes) == b"x" * 10

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(produced) == 1


def test_fetches_at_the_same_moment_stay_within_the_limit_together(tmp_path):
    cache, barrier = DiskCache(tmp_path, 35), threading.Barrier(6)
    by_lock = {int(cache.path(key).name[:2], 16) % 64: key for key in map(str, range(60))}
    keys = list(by_lock.values())[:6]  # each under a lock of its own, so that none waits for another

    def produce(path: Path) -> None:
        path.write_bytes(b"x" * 10)
        barrier.wait(timeout=30)

    threads = [threading.Thread(target=cache.fetch, args=(key, produce, Path.read_bytes)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = [path.stat().st_size for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert 0 < sum(kept) <= 35


def test_parts_that_need_one_file_never_wait_for_each_other(tmp_path):
    cache = DiskCache(tmp_path, 1000)

    def produce(path: Path) -> None:
        cache.fetch("file", lambda path: path.write_bytes(b"whole"), Path.read_bytes, inner=True)
        path.write_bytes(b"part")

    # of 300 keys some share the file's lock number, and threads hold all others at some moment
    with ThreadPoolExecutor(16) as pool:
        parts = [pool.submit(cache.fetch, f"{part}", produce, Path.read_bytes) for part in range(300)]
        assert {part.result(timeout=60) for part in parts} == {b"part"}


def test_a_lock_is_released_although_a_process_was_forked_while_it_was_held(tmp_path):
    children = []

    def produce(path: Path) -> None:
        children.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)))
        children[0].start()
        path.write_bytes(b"x")

    cache = DiskCache(tmp_path, 1000)
    try:
        cache.fetch("key", produce, Path.read_bytes)
        cache.path("key").unlink()
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(cache.fetch, "key", lambda path: path.write_bytes(b"y"), Path.read_bytes)
            assert again.result(timeout=30) == b"y"
    finally:
        children[0].kill()
        children[0].join()


def test_training_that_is_slower_than_the_link_waits_for_the_first_block_only(tmp_path, memory, monkeypatch):
    loader = TokenLoader(memory, **options(tmp_path))
    read, reads = places.RemotePlace.read, []

    def slow(self, name, start, stop):
        time.sleep(0.3)
        reads.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(places.RemotePlace, "read", slow)
    loader.next_batch()
    first, at_first = loader.wait_seconds, len(reads)
    assert first >= 0.3
    for blocks in range(4):  # of 1, 2, 4, ... batches, each read while the one before it is used
        time.sleep(0.6)
        for _ in range(2 ** (blocks + 1)):
            loader.next_batch()
    assert len(reads) > at_first
    assert loader.wait_seconds - first < 0.3


class Flaky(http.server.SimpleHTTPRequestHandler):
    """Serves byte ranges, and fails each object's first request with 503."""

    seen: set[str] = set()  # noqa: RUF012 - reset by the fixture
    always = ""

    def do_GET(self):
        key = f"{self.path}{self.headers.get('Range')}"
        if key not in self.seen or (self.always and self.always in self.path):
            self.seen.add(key)
            self.send_error(503)
            return
        path = Path(self.directory) / self.path.strip("/")
        span = self.headers.get("Range")
        if span is None or path.is_dir():
            super().do_GET()
            return
        first, last = (int(x) for x in span.removeprefix("bytes=").split("-"))
        body = path.read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def web(folder):
    Flaky.seen, Flaky.always = set(), ""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Flaky, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_web_server_that_fails_now_and_then_is_asked_again(tmp_path, folder, web):
    pytest.importorskip("aiohttp")
    remote = TokenLoader(web, **options(tmp_path))
    assert batches(remote) == batches(TokenLoader(str(folder), **options(tmp_path)))
    Flaky.always = "2.arrow"
    with pytest.raises(RuntimeError, match=r"http://.*/2\.arrow cannot be read after 5 attempts"):
        TokenLoader(web, **options(tmp_path, "other"))


def test_an_object_that_gives_fewer_bytes_than_asked_is_named(tmp_path, memory, monkeypatch):
    loader = TokenLoader(memory, **options(tmp_path))
    files = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(files, "cat_file", lambda self, path, start, end: b"short")
    with pytest.raises(RuntimeError, match=r"memory://.*\.arrow gave 5 bytes for the range"):
        loader.next_batch()


def test_errors_name_the_object(tmp_path):
    with pytest.raises(ValueError, match=r"no token files in memory://nowhere \(0 files looked at\)|There is no"):
        open_sources("memory://nowhere")
    with pytest.raises(ValueError, match=r"nosuchscheme://x needs a package|Protocol not known"):
        open_sources("nosuchscheme://x")
