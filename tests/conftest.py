"""One thread before anything else: a fork after a multi-threaded matrix product would deadlock."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHELASTIC_ERROR_FILE", os.devnull)
for leftover in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK"):  # a launcher's environment must not leak in
    os.environ.pop(leftover, None)

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests, saying why, where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and this machine has none"))
