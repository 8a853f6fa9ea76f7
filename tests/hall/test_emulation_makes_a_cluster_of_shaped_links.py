"""An emulated cluster has links of the given rate and leaves nothing behind, however it ends."""

import multiprocessing
import time
from pathlib import Path

import pytest

from lightning_parm.bench import emulation
from lightning_parm.bench.emulation import EmulatedCluster, bytes_per_second, run_emulated, why_unavailable

REASON = why_unavailable()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def processes_with(text: str) -> list[str]:
    """Command lines of all processes that contain ``text``."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if text in line:
            lines.append(line)
    return lines


def all_end_with(text: str) -> bool:
    """Whether all processes with ``text`` in their command lines end within some seconds; the kernel takes a moment."""
    deadline = time.monotonic() + 10
    while processes_with(text) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_with(text)


def test_sizes_and_rates_are_read_from_text() -> None:
    cluster = EmulatedCluster.parse("nodes=2,per_node=4,inter=0.5gbit,intra=free")
    assert cluster == EmulatedCluster(nodes=2, per_node=4, inter="0.5gbit", intra=None)
    assert cluster.world_size == 8
    assert bytes_per_second(cluster.inter) == 62.5e6


@pytest.mark.parametrize("text", ["", "nodes=2", "nodes=2,per_node=x", "nodes=2,per_node=2,speed=1mbit"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="does not describe a cluster; write nodes=2,per_node=2"):
        EmulatedCluster.parse(text)


def test_an_impossible_size_or_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="per_node=0 must be at least 1"):
        EmulatedCluster(nodes=1, per_node=0)
    for rate in ("fast", "0mbit", "-1mbit", "10"):
        with pytest.raises(ValueError, match="is not the rate of a link; write a number and kbit, mbit or gbit"):
            EmulatedCluster(nodes=1, per_node=1, inter=rate)


def test_a_machine_without_the_tools_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_TOOLS", ("unshare", "no-such-program"))
    with pytest.raises(OSError, match=r"needs the programs no-such-program .* run on a real cluster with torchrun"):
        run_emulated(EmulatedCluster(1, 1), "hall.emulated_ranks:hang", {})


def test_a_machine_without_permission_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "_isolated", lambda: ["sh", "-c", "echo not permitted >&2; exit 1"])
    assert "does not allow network namespaces with shaped links (not permitted)" in str(why_unavailable())


@needs_namespaces
def test_ranks_stand_on_nodes_of_their_own_behind_links_of_the_given_rate() -> None:
    num_bytes = 2_000_000
    result = run_emulated(
        EmulatedCluster(nodes=2, per_node=1, inter="40mbit"),
        "hall.emulated_ranks:receive_on_rank_0",
        {"num_bytes": num_bytes},
    )
    assert result["peer"] == "10.77.0.2"
    assert result["congestion"] == "reno"  # whatever this machine's own connections use
    assert result["interfaces"] == 2  # its own loopback and its own link, nothing of this machine's
    assert [result[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")] == list("2010")
    on_the_wire = num_bytes / bytes_per_second("40mbit")
    assert on_the_wire * 0.9 < result["seconds"] < on_the_wire * 2


@needs_namespaces
def test_a_failing_rank_ends_all_others_and_its_traceback_is_told() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)Rank 1 of the emulated cluster failed.*rank 1 cannot go on"):
        run_emulated(EmulatedCluster(1, 2), "hall.emulated_ranks:fail_on_rank_1_while_rank_0_hangs", {})
    assert time.monotonic() - started < 60
    assert all_end_with("fail_on_rank_1_while_rank_0_hangs")


@needs_namespaces
def test_nothing_is_left_when_the_time_is_over_or_the_caller_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "started"
    job = (EmulatedCluster(1, 1), "hall.emulated_ranks:hang", {"started": str(file)})
    caller = multiprocessing.get_context("fork").Process(target=run_emulated, args=job)
    caller.start()
    try:
        deadline = time.monotonic() + 60
        while not file.exists():
            assert caller.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert processes_with(str(file))
    finally:
        caller.kill()
        caller.join()
    assert all_end_with(str(file))

    with pytest.raises(TimeoutError, match=r"did not finish on the emulated cluster within 0\.5 s"):
        run_emulated(EmulatedCluster(1, 1), "hall.emulated_ranks:hang", {"started": str(file)}, timeout=0.5)
    assert all_end_with(str(file))
