"""What ranks of an emulated cluster run in tests; plain sockets, so that only the links are measured."""

import os
import socket
import time
from pathlib import Path


def receive_on_rank_0(num_bytes: int) -> dict[str, object]:
    """Rank 1 sends to rank 0, which reports how long that took and where it stands."""
    if os.environ["RANK"] == "0":
        with socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as server:
            connection, peer = server.accept()
            started, received = time.perf_counter(), 0
            while received < num_bytes:
                received += len(connection.recv(1 << 20))
            seconds = time.perf_counter() - started
        names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        interfaces = Path("/proc/self/net/dev").read_text().count(":")
        return {
            "seconds": seconds,
            "peer": peer[0],
            "congestion": connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode(),
            "interfaces": interfaces,
            **{name: os.environ[name] for name in names},
        }
    for _ in range(100):
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as connection:
                connection.sendall(bytes(num_bytes))
            return {}
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise ConnectionRefusedError


def fail_on_rank_1_while_rank_0_hangs() -> None:
    if os.environ["RANK"] == "1":
        raise ArithmeticError("rank 1 cannot go on")
    time.sleep(600)


def hang(started: str) -> None:
    Path(started).touch()
    time.sleep(600)
