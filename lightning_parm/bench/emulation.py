"""A cluster on one Linux machine: network namespaces as nodes, joined by a bridge, with links of a given rate.

Everything lives inside one supervisor process that ``unshare`` puts into network and process namespaces of its own.
No namespace is named or mounted anywhere, so when the supervisor ends, for whatever reason, the kernel removes
the ranks, the nodes and their links with it: there is nothing to clean up, even after ``kill -9``.

    node 0: ranks 0, 1 --lo (intra)--  eth0 --(inter)--+
                                                       bridge
    node 1: ranks 2, 3 --lo (intra)--  eth0 --(inter)--+
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_TOOLS = ("unshare", "setpriv", "ip", "tc")
_CLONE_NEWNET = 0x40000000
_ADDRESS = "10.77.0.{}"
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class EmulatedCluster:
    """Sizes and link rates of a cluster to emulate.

    Args:
        nodes: Number of nodes, joined by a switch.
        per_node: Ranks on each node.
        inter: Rate of each node's link to the switch in each direction, as ``"200mbit"``; ``None`` leaves it free.
        intra: Rate of the fabric inside a node, shared by all its ranks; ``None`` leaves it free.

    Raises:
        ValueError: If a size is below 1 or a rate is none.

    Example:
        >>> EmulatedCluster.parse("nodes=2,per_node=4,inter=200mbit").world_size
        8
    """

    nodes: int
    per_node: int
    inter: str | None = None
    intra: str | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        for rate in (self.inter, self.intra):
            bytes_per_second(rate)

    @classmethod
    def parse(cls, text: str) -> EmulatedCluster:
        """Read ``nodes=2,per_node=2,inter=200mbit,intra=200mbit``; ``free`` or no rate leaves a link unshaped.

        Raises:
            ValueError: If the text has another form.
        """
        fields = dict(part.partition("=")[::2] for part in text.split(","))
        unknown = sorted(fields.keys() - {"nodes", "per_node", "inter", "intra"})
        sizes = [fields.get(name, "") for name in ("nodes", "per_node")]
        if unknown or not all(size.isdecimal() for size in sizes):
            raise ValueError(
                f"{text!r} does not describe a cluster; write nodes=2,per_node=2,inter=200mbit,intra=200mbit, "
                "where the two rates may be left out."
            )
        rates = [None if fields.get(name) == "free" else fields.get(name) for name in ("inter", "intra")]
        return cls(int(sizes[0]), int(sizes[1]), *rates)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node


def bytes_per_second(rate: str | None) -> float:
    """Bytes per second of a rate such as ``"200mbit"``, infinite for ``None``.

    Raises:
        ValueError: If it is no rate.

    Example:
        >>> bytes_per_second("200mbit")
        25000000.0
    """
    if rate is None:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not match or not float(match[1]):
        raise ValueError(f"{rate!r} is not the rate of a link; write a number and kbit, mbit or gbit, as 200mbit.")
    return float(match[1]) * _BITS[match[2]] / 8


def why_unavailable() -> str | None:
    """Why this machine cannot emulate a cluster, or ``None`` where it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"emulating a cluster needs the programs {', '.join(missing)} (Linux packages util-linux and iproute2)"
    probe = (
        "ip link add br0 type bridge && ip link add p0 type veth peer name p1 && ip link set lo up"
        " && tc qdisc add dev p0 root tbf rate 1mbit burst 10kb latency 50ms"
    )
    done = subprocess.run([*_isolated(), "sh", "-c", probe], capture_output=True, text=True)
    if done.returncode:
        return f"this machine does not allow network namespaces with shaped links ({done.stderr.strip()})"
    return None


def run_emulated(cluster: EmulatedCluster, function: str, arguments: dict[str, Any], timeout: float = 600.0) -> Any:
    """Call a function on every rank of an emulated cluster and return rank 0's result.

    Ranks are forked with the environment that ``torchrun`` gives (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so
    what runs on a cluster runs here.

    Args:
        cluster: Sizes and rates.
        function: ``"package.module:function"``.
        arguments: Its keyword arguments, as JSON has them.
        timeout: Seconds after which everything is ended.

    Returns:
        What rank 0 returned, through JSON.

    Raises:
        OSError: If namespaces are not available here.
        RuntimeError: If a rank failed; the message has its traceback.
        TimeoutError: If the time was over.
    """
    if reason := why_unavailable():
        raise OSError(f"{reason[0].upper()}{reason[1:]}; run on a real cluster with torchrun instead.")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        job = {"cluster": asdict(cluster), "function": function, "arguments": arguments, "result": str(result)}
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        environment["XDG_CACHE_HOME"] = folder  # what is measured on these links must not be kept as this machine's
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns that addresses here have no host names
        # this file alone, as a script: importing the package is left to functions that need it
        start = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        supervisor = [sys.executable, "-c", start, json.dumps(job)]
        try:
            code = subprocess.run([*_isolated(), *supervisor], timeout=timeout, env=environment).returncode
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{function} did not finish on the emulated cluster within {timeout:g} s.") from None
        if not result.exists():
            raise RuntimeError(f"The emulated cluster ended with code {code} before its ranks did.")
        outcome = json.loads(result.read_text())
    if "error" in outcome:
        raise RuntimeError(f"Rank {outcome['rank']} of the emulated cluster failed:\n{outcome['error']}")
    return outcome["value"]


def _isolated() -> list[str]:
    """The start of a command whose processes have their own network and process ids, and end with their starter."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [
        *("setpriv", "--pdeathsig", "KILL", "unshare", *user),
        *("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
    ]


# ------------------------------------------------------------------ inside the supervisor


def _supervise(job: dict[str, Any]) -> None:
    cluster = EmulatedCluster(**job["cluster"])
    module, _, name = job["function"].partition(":")
    function = getattr(import_module(module), name)  # imported once; the ranks inherit it
    nodes = _build(cluster)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(cluster.world_size)]
    for rank in range(cluster.world_size):
        node, local = divmod(rank, cluster.per_node)
        environment = _environment(cluster, rank, local, node)
        arguments = (nodes[node], environment, function, job["arguments"], pipes[rank][1])
        context.Process(target=_rank, args=arguments).start()
        pipes[rank][1].close()
    # whoever fails ends the job: this process is the first of its namespace, so its end is that of all others
    Path(job["result"]).write_text(json.dumps(_first_failure_or_result([reader for reader, _ in pipes])))


def _build(cluster: EmulatedCluster) -> list[int]:
    """Make nodes and links; returns a handle on each node's network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    nodes = []
    for _ in range(cluster.nodes):
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot make a network namespace")
        nodes.append(os.open("/proc/self/ns/net", os.O_RDONLY))
    _enter(home)
    _run("ip link add br0 type bridge")
    _run("ip link set br0 up")
    for index, node in enumerate(nodes):
        _run(f"ip link add p{index} type veth peer name eth0 netns /proc/{os.getpid()}/fd/{node}")
        _run(f"ip link set p{index} master br0 up")
        _shape(f"p{index}", cluster.inter)
        _enter(node)
        _run(f"ip addr add {_ADDRESS.format(index + 1)}/24 dev eth0")
        _run("ip link set eth0 up")
        _run("ip link set lo up")
        # BBR, the default of some machines, keeps measuring its path: it slows connections down while nothing is lost.
        # Everyone may choose reno.
        with suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
        _shape("eth0", cluster.inter)
        _shape("lo", cluster.intra)
        _enter(home)
    return nodes


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _shape(device: str, rate: str | None) -> None:
    if rate is not None:
        # a deep queue: senders wait for the link, as they do on a network that loses nothing
        _run(f"tc qdisc add dev {device} root tbf rate {rate} burst 131072 limit {64 << 20}")


def _environment(cluster: EmulatedCluster, rank: int, local: int, node: int) -> dict[str, str]:
    sizes = {"WORLD_SIZE": cluster.world_size, "LOCAL_WORLD_SIZE": cluster.per_node, "GROUP_WORLD_SIZE": cluster.nodes}
    ranks = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "NODE_RANK": node}
    return {
        **{name: str(value) for name, value in {**sizes, **ranks}.items()},
        "MASTER_ADDR": _ADDRESS.format(1),
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCHELASTIC_RUN_ID": "emulated",
    }


def _rank(
    node: int, environment: dict[str, str], function: Callable[..., Any], arguments: dict[str, Any], pipe: Any
) -> None:
    try:
        _enter(node)
        os.environ.update(environment)
        pipe.send({"value": function(**arguments)})
    except BaseException:
        pipe.send({"error": traceback.format_exc()})


def _first_failure_or_result(pipes: Sequence[Connection]) -> dict[str, Any]:
    """Rank 0's outcome when all are done, or that of the rank that failed."""
    outcomes: dict[int, dict[str, Any]] = {}
    while len(outcomes) < len(pipes):
        for rank in [rank for rank in range(len(pipes)) if rank not in outcomes]:
            if not pipes[rank].poll(0.02):
                continue
            try:
                outcomes[rank] = pipes[rank].recv()
            except EOFError:
                outcomes[rank] = {"error": "it died without a word"}
            if "error" in outcomes[rank]:
                return {"rank": rank, **outcomes[rank]}
    return outcomes[0]


if __name__ == "__main__":
    _supervise(json.loads(sys.argv[1]))
    os._exit(0)  # without waiting for ranks that hang because another one failed
