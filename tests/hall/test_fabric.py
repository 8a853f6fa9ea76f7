"""A loop written with Fabric trains the same numbers as the Trainer and as one process, and its checkpoints move."""

import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from data.corpora import write_arrow
from distributed import run_command, run_ranks
from hall.models import small_gpt
from hall.test_training_equals_one_process import CLIP_AND_ACCUMULATE, fit
from hall.trainers import ForkedEnvironment, RandomTokens, make_trainer
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_parm import MoE, ParmStrategy
from lightning_parm.checkpoint.directory import META, consolidate
from lightning_parm.data import TokenLoader
from lightning_parm.fabric import FabricParmStrategy
from lightning_parm.parallel.gradients import AgreedGradScaler
from lightning_parm.registration import VARIANTS

MP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 1, "expert_shard_size": 2}
MP2_EP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 2}
DP4 = {"expert_parallel_size": 1}
EP2 = {"expert_parallel_size": 2, "expert_shard_size": 1, "schedule": "s1", "chunks": 2}
ESP2 = {"expert_parallel_size": 1, "expert_shard_size": 2, "schedule": "s2"}
MP2_EP2_EDP2 = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_shard_size": 1}
SHARD = {"data_parallel": "shard"}
Sizes = dict[str, Any] | None


def make_fabric(rank: int, world_size: int, sizes: Sizes = None, **options: Any) -> Fabric:
    """A launched Fabric on one of the forked ranks, or on the only process."""
    strategy: Any = "auto" if sizes is None else FabricParmStrategy(**{"calibrate": False, **sizes})
    environment = [] if sizes is None else [ForkedEnvironment(rank, world_size)]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=environment, **options)
    fabric.launch()
    return fabric


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def loop(rank: int, world_size: int, sizes: Sizes, steps: int) -> tuple[list[float], list[float]]:
    """What :func:`fit` makes a Trainer do: two batches a step, clipped at 0.5; the optimizer is made before the cut."""
    fabric = make_fabric(rank, world_size, sizes)
    model = small_gpt(torch.float64)
    configured = model.configure_optimizers()
    scheduler = configured["lr_scheduler"]["scheduler"]
    model, optimizer = fabric.setup(model, configured["optimizer"])
    replicas = getattr(fabric.strategy, "distributed_sampler_kwargs", {"num_replicas": 1})["num_replicas"]
    loader = fabric.setup_dataloaders(DataLoader(RandomTokens(80), batch_size=8 // replicas))
    losses, norms = [], []
    for index in range(2 * steps):
        if index % len(loader) == 0:
            batches = iter(loader)
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            loss = loss_of(model, next(batches))
            fabric.backward(loss / 2)
        losses.append(float(fabric.all_reduce(loss.detach().clone())))
        if index % 2:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, {"expert_parallel_size": 2}),
        (2, MP2),
        (4, MP2_EP2),
        (4, {"expert_parallel_size": 2, "expert_shard_size": 1, "schedule": "s2"}),
    ],
)
def test_the_same_numbers_as_the_trainer_in_one_process(world_size: int, sizes: dict[str, Any]) -> None:
    losses, norms = fit(0, 1, None, 6, CLIP_AND_ACCUMULATE, torch.float64)
    for ours, our_norms in run_ranks(world_size, loop, sizes, 6):
        torch.testing.assert_close(ours, losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(our_norms, norms, rtol=0, atol=1e-10)


class Blocks(nn.Module):
    """A plain module: blocks in a list, which shards travel with, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), MoE(16, 32, 4), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(16, 32)
        self.scale = nn.Parameter(torch.ones(32))
        self.double()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


def evaluated_loop(rank: int, world_size: int, sizes: Sizes, plain: bool) -> list[float]:
    """Two batches a step, clipped by norm and by value in turns, and evaluated before and after the step.

    A plain module is set up, and evaluated, before its optimizer is made; the other one together with it.
    """
    fabric = make_fabric(rank, world_size, sizes)
    data = getattr(fabric.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    size = 8 // data["num_replicas"]
    tokens = RandomTokens(7 * 8).tokens
    losses: list[float] = []

    def note(loss: Tensor) -> None:
        losses.append(float(fabric.all_reduce(loss.detach().clone())))

    def loss_at(index: int) -> Tensor:
        part = tokens[8 * index + size * data["rank"] :][:size]
        return loss_of(model, {"input_ids": part[:, :-1], "labels": part[:, 1:]})

    def evaluate() -> None:
        with torch.no_grad():
            note(loss_at(6))

    model: Any = Blocks() if plain else small_gpt(torch.float64)
    if plain:
        model = fabric.setup_module(model)
        evaluate()  # leaves what is beside the blocks gathered
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.02))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    for step in range(3):
        for half in range(2):
            with fabric.no_backward_sync(model, enabled=half == 0):
                loss = loss_at(2 * step + half)
                fabric.backward(loss / 2)
            note(loss)
        fabric.clip_gradients(model, optimizer, **({"clip_val": 0.01} if step % 2 else {"max_norm": 0.5}))
        evaluate()
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
    if (sizes or {}).get("data_parallel") == "shard":
        assert isinstance(model.module, FSDPModule)
        held = [p.to_local() if isinstance(p, DTensor) else p for g in optimizer.param_groups for p in g["params"]]
        assert sum(part.numel() for part in held) < sum(p.numel() for p in model.module.parameters())
    fabric.strategy.teardown()
    return losses


@pytest.mark.parametrize(("plain", "every"), [(True, [DP4, EP2]), (False, [MP2_EP2_EDP2])], ids=["plain", "lightning"])
def test_shards_train_the_same_numbers_and_evaluations_between_change_nothing(plain: bool, every: list[Sizes]) -> None:
    def rank_main(rank: int, world_size: int) -> list[list[float]]:
        return [evaluated_loop(rank, world_size, {**(sizes or {}), **SHARD}, plain) for sizes in every]

    expected = evaluated_loop(0, 1, None, plain)
    assert abs(expected[-1] - expected[-2]) > 1e-3, "a step changes what an evaluation finds"
    for results in run_ranks(4, rank_main):
        for losses in results:
            torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)


def test_one_process_of_fabric_and_one_rank_of_parm_agree() -> None:
    expected = loop(0, 1, None, 3)
    torch.testing.assert_close(run_ranks(1, loop, {}, 3)[0], expected, rtol=0, atol=1e-12)


def train(
    rank: int, world_size: int, sizes: Sizes, corpus: str, steps: int, save_to: str | None, resume_from: str | None
) -> list[float]:
    """Train on tokens and leave, or begin with, everything that a resume needs."""
    more = {"save_distributed_checkpoint": not (save_to or "").endswith(".pt")} if sizes is not None else {}
    fabric = make_fabric(rank, world_size, None if sizes is None else {**sizes, **more})
    model = small_gpt(torch.float64)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    data = getattr(fabric.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    size = data["num_replicas"]
    loader = TokenLoader(corpus, 8, 8 // size, rank=data["rank"], size=size, num_logical_shards=8)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    if resume_from is not None:
        assert fabric.load(resume_from, state) == {}
    losses: list[float] = []
    for batch in loader:
        if state["step"] == steps:
            break
        loss = loss_of(model, batch)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach().clone())))
        state["step"] += 1
        if state["step"] == 3 and save_to is not None:
            fabric.save(save_to, state)
    if sizes is not None:
        fabric.strategy.teardown()
    return losses


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 32, length).astype(np.uint16) for length in random.integers(1, 40, 200)]
    return str(write_arrow(tmp_path_factory.mktemp("corpus") / "tokens.arrow", documents))


def test_a_run_on_tokens_goes_on_from_a_directory_or_a_file_on_other_sizes(tmp_path: Path, corpus: str) -> None:
    expected = train(0, 1, None, corpus, 6, str(tmp_path / "one.pt"), None)
    assert expected[-1] != expected[0]
    saved_by: list[tuple[str, int, dict[str, Any]]] = [("mp2.pt", 2, MP2), ("mp2ep2", 4, MP2_EP2)]
    for name, world_size, sizes in saved_by:
        for losses in run_ranks(world_size, train, sizes, corpus, 3, str(tmp_path / name), None):
            torch.testing.assert_close(losses, expected[:3], rtol=0, atol=1e-10)
    assert (tmp_path / "mp2.pt").is_file()
    assert (tmp_path / "mp2ep2").is_dir()
    consolidate(str(tmp_path / "mp2ep2"), str(tmp_path / "whole.pt"))
    resumed: list[tuple[int, dict[str, Any], str]] = [
        (2, {"expert_parallel_size": 2}, "one.pt"),
        (2, {"expert_parallel_size": 2, **SHARD}, "mp2ep2"),
        (4, MP2_EP2, "mp2.pt"),
        (2, MP2, "mp2ep2"),
        (2, MP2, "whole.pt"),
        (1, {}, "mp2ep2"),
    ]
    for world_size, sizes, name in resumed:
        for losses in run_ranks(world_size, train, sizes, corpus, 6, None, str(tmp_path / name)):
            torch.testing.assert_close(losses, expected[3:], rtol=0, atol=1e-10)
    torch.testing.assert_close(
        train(0, 1, None, corpus, 6, None, str(tmp_path / "mp2.pt")), expected[3:], rtol=0, atol=1e-10
    )


def test_checkpoints_go_from_shards_to_replicas_and_back(tmp_path: Path, corpus: str) -> None:
    expected = train(0, 1, None, corpus, 5, str(tmp_path / "one.pt"), None)

    def rank_main(rank: int, world_size: int) -> tuple[list[list[float]], list[list[float]]]:
        def run(sizes: dict[str, Any], steps: int, save_to: str | None, resume_from: str | None = None) -> list[float]:
            paths = [name and str(tmp_path / name) for name in (save_to, resume_from)]
            return train(rank, world_size, sizes, corpus, steps, *paths)

        began = [
            run({**EP2, **SHARD, "async_checkpoint": True}, 4, "shards"),  # another step while step 3 is written
            run({**MP2_EP2_EDP2, **SHARD}, 4, "shards.pt"),
        ]
        resumed = [
            run({**MP2_EP2_EDP2, **SHARD}, 5, None, "one.pt"),
            run({**ESP2, **SHARD}, 5, None, "shards"),
            run({**DP4, **SHARD}, 5, None, "shards"),
        ]
        return began, resumed

    for began, resumed in run_ranks(4, rank_main):
        for losses in began:
            torch.testing.assert_close(losses, expected[:4], rtol=0, atol=1e-10)
        for losses in resumed:
            torch.testing.assert_close(losses, expected[3:], rtol=0, atol=1e-10)
    alone = train(0, 1, None, corpus, 5, None, str(tmp_path / "shards.pt"))
    torch.testing.assert_close(alone, expected[3:], rtol=0, atol=1e-10)
    for losses in run_ranks(2, train, {"expert_parallel_size": 2}, corpus, 5, None, str(tmp_path / "shards")):
        torch.testing.assert_close(losses, expected[3:], rtol=0, atol=1e-10)


def test_a_save_on_a_thread_holds_what_it_was_given_and_its_failure_reaches_every_rank(tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> None:
        go_on = threading.Event()
        write_data = FileSystemWriter.write_data

        def write(self: Any, *args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            if "slow" in str(self.path):
                assert go_on.wait(30)
            if "full" in str(self.path) and rank == 1:
                raise OSError(28, "No space left on device")
            return write_data(self, *args)

        fabric = make_fabric(rank, world_size, {"expert_parallel_size": 2, "async_checkpoint": True})
        model = fabric.setup(small_gpt())
        before = [p.detach().clone() for p in model.parameters()]
        with mock.patch.object(FileSystemWriter, "write_data", write):
            fabric.save(tmp_path / "slow", {"model": model})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            assert not (tmp_path / "slow" / META).exists()
            threading.Timer(0.3, go_on.set).start()
            fabric.load(tmp_path / "slow", {"model": model})  # waits for it
            for parameter, value in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(parameter.detach(), value, rtol=0, atol=0)
            failure = r"full' cannot be saved: rank 1: OSError: \[Errno 28\] No space left on device"
            fabric.save(tmp_path / "full", {"model": model})
            with pytest.raises(RuntimeError, match=failure):
                fabric.strategy.finish_saves()
            fabric.save(tmp_path / "again", {"model": model})
            fabric.save(tmp_path / "full", {"model": model})
            with pytest.raises(RuntimeError, match=failure):
                fabric.strategy.teardown()
        assert (tmp_path / "again" / META).is_file()
        assert not (tmp_path / "full" / META).exists()

    run_ranks(2, rank_main)


SCRIPT = """
import time
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from lightning_parm.fabric import FabricParmStrategy

write_data = FileSystemWriter.write_data

def slowly(self, *args):
    time.sleep(0.5)
    if "full" in str(self.path) and fabric.global_rank == 1:
        raise OSError(28, "No space left on device")
    return write_data(self, *args)

FileSystemWriter.write_data = slowly
fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricParmStrategy(async_checkpoint=True))
fabric.launch()
model = fabric.setup(nn.Linear(4, 4))
fabric.save("whole", {"model": model, "step": 3})
fabric.save("full", {"model": model})
"""


def test_a_script_that_ends_after_a_save_leaves_it_whole_or_says_why_not(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = run_command([sys.executable, "script.py"], cwd=tmp_path, fresh=False)
    assert finished.returncode == 0, finished.stderr
    assert not finished.survivors
    consolidate(str(tmp_path / "whole"), str(tmp_path / "whole.pt"))
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert saved["state_dict"]["model.weight"].shape == (4, 4)
    assert not (tmp_path / "full" / META).exists()
    assert "full' cannot be saved: rank 1: OSError: [Errno 28] No space left on device" in finished.stderr


def test_a_launched_function_ends_when_its_saves_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data = FileSystemWriter.write_data

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(0.2)
        if "full" in str(self.path):
            raise OSError(28, "No space left on device")
        return write_data(self, *args)

    def save(fabric: Fabric, name: str) -> None:
        fabric.save(tmp_path / name, {"model": fabric.setup(nn.Linear(2, 2))})

    def launch(name: str) -> None:
        strategy = FabricParmStrategy(start_method="fork", async_checkpoint=True)
        Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(save, name)

    monkeypatch.setattr(FileSystemWriter, "write_data", slowly)
    launch("whole")
    assert (tmp_path / "whole" / META).is_file()
    with pytest.raises(ProcessRaisedException, match=r"full' cannot be saved: rank 0 .* No space left"):
        launch("full")


def test_parts_of_a_checkpoint_can_be_filtered_and_read_alone(tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> None:
        fabric = make_fabric(rank, world_size, {"expert_parallel_size": 2})
        model = fabric.setup(small_gpt(torch.float64))
        other = fabric.setup(nn.Linear(2, 2))
        plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        plain.param_groups[0]["params"][0].grad = torch.ones(2)
        plain.step()
        state = {"model": model, "other": other, "plain": plain, "notes": [1, 2]}
        fabric.save(tmp_path / "all", state)
        fabric.save(tmp_path / "some", state, filter={"model": lambda name, _: "experts" in name})
        whole = fabric.load(tmp_path / "all")
        assert whole["notes"] == [1, 2]
        assert whole["model"]["blocks.0.feed_forward.experts.w_in"].shape[0] == 4, "all experts, not this rank's two"
        assert set(whole["other"]) == {"weight", "bias"}
        momentum = whole["plain"]["state"][0]["momentum_buffer"]
        assert momentum.tolist() == [1.0, 1.0]
        some = fabric.load(tmp_path / "some")
        assert len(some["model"]) == 4
        assert all("experts" in name for name in some["model"])
        with pytest.raises(KeyError, match="'missing'"):
            fabric.load(tmp_path / "all", {"missing": 0})
        lenient = {"missing": 0, "notes": None}
        fabric.load(tmp_path / "all", lenient, strict=False)
        assert lenient == {"missing": 0, "notes": [1, 2]}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if fabric.is_global_zero:
            torch.save(whole["model"], tmp_path / "raw.pt")
        fabric.barrier()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        fabric.load_raw(tmp_path / "raw.pt", model)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)

    run_ranks(2, rank_main)


def test_a_trainers_directory_is_told_from_fabrics(tmp_path: Path) -> None:
    def rank_main(rank: int, world_size: int) -> None:
        trainer = make_trainer(rank, world_size, ParmStrategy(expert_parallel_size=2), max_steps=1)
        trainer.fit(small_gpt(), DataLoader(RandomTokens(8), batch_size=4))
        trainer.save_checkpoint(tmp_path / "trainer.ckpt")
        fabric = make_fabric(rank, world_size, {"expert_parallel_size": 2})
        model = fabric.setup(small_gpt())
        with pytest.raises(ValueError, match=r"trainer\.ckpt' was saved by a Trainer and not by fabric\.save"):
            fabric.load(tmp_path / "trainer.ckpt", {"model": model})

    run_ranks(2, rank_main)


def test_two_models_each_with_its_optimizer_and_one_of_them_kept_local() -> None:
    def rank_main(rank: int, world_size: int, sizes: Sizes) -> list[Tensor]:
        fabric = make_fabric(rank, world_size, sizes)
        torch.manual_seed(4)
        moe, head = MoE(8, 16, 4).double(), nn.Linear(8, 8).double()
        moe, first = fabric.setup(moe, torch.optim.SGD(moe.parameters(), lr=0.5))
        head, second = fabric.setup(head, torch.optim.SGD(head.parameters(), lr=0.5))
        tokens = RandomTokens(16).tokens[:, :8].double() / 32
        for step in range(4):
            x = tokens[4 * step + rank * (4 // world_size) : 4 * step + (rank + 1) * (4 // world_size)]
            first.zero_grad()
            second.zero_grad()
            with fabric.no_backward_sync(moe):
                fabric.backward((head(moe(x)) - x).square().mean())
            fabric.backward(moe(x).square().mean())
            fabric.clip_gradients(head, second, clip_val=0.01)
            first.step()
            second.step()
        assert first.state_dict()["param_groups"][0]["lr"] == 0.5
        return [head.weight.detach(), moe.router.weight.detach()]

    expected = rank_main(0, 1, None)
    for weights in run_ranks(2, rank_main, {"expert_parallel_size": 2}):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_an_optimizer_with_a_state_follows_the_cut() -> None:
    def rank_main(rank: int, world_size: int, sizes: Sizes) -> list[float]:
        fabric = make_fabric(rank, world_size, sizes)
        model = small_gpt(torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batch = {key: value[None] for key, value in RandomTokens(1)[0].items()}
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
        losses = []
        for _ in range(3):
            loss = loss_of(model, batch)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected = rank_main(0, 1, None)
    for losses in run_ranks(2, rank_main, MP2):
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)


def test_two_schedules_are_timed_after_the_first_step_over_whole_steps_and_no_number_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def train(rank: int, world_size: int, **options: Any) -> tuple[list[float], list[Any]]:
        fabric = make_fabric(rank, world_size, {**MP2, **options})
        model = small_gpt(torch.float64)
        layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
        parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            parts["experts" in name].append(parameter)
        model, *optimizers = fabric.setup(model, *(torch.optim.AdamW(part, lr=0.01) for part in parts.values()))
        losses, seen = [], []
        for index in range(14):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = loss_of(model, {key: value[None] for key, value in RandomTokens(14)[index].items()})
                fabric.backward(loss)
            losses.append(float(loss.detach()))
            seen.append([(layer.schedule, layer.transport, layer.chunks) for layer in layers])
            if index % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert not any(layer._forward_pre_hooks for layer in layers)
        fabric.strategy.teardown()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        return losses, seen

    def rank_main(rank: int, world_size: int) -> list[Any]:
        expected, _ = train(rank, world_size, schedule="s1")
        losses, seen = train(rank, world_size, calibrate=True, verify_steps=1)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
        return seen

    first, second = run_ranks(2, rank_main)
    assert first == second
    assert first[::2] == first[1::2], "the batches of one step run alike"
    before, best, other, again, other_again, kept, still = first[::2]
    assert {schedule for schedule, _, _ in before} == {"auto"}
    assert best == again != other == other_again
    assert kept == still
    assert kept in (best, other)
    assert all(schedule in ("plain", "s0", "s1", "s2") for schedule, _, _ in kept)


def test_peers_of_a_tensor_parallel_group_read_and_draw_the_same() -> None:
    def rank_main(rank: int, world_size: int) -> tuple[list[int], float]:
        fabric = make_fabric(rank, world_size, {"tensor_parallel_size": 2})
        fabric.seed_everything(rank, verbose=False)  # as users do who want other batches on each rank
        fabric.setup(small_gpt())
        loader = fabric.setup_dataloaders(DataLoader(range(8), batch_size=2))
        return [int(i) for batch in loader for i in batch], float(torch.rand(()))

    first, second, third, fourth = run_ranks(4, rank_main)
    assert first == second != third == fourth
    assert sorted(first[0] + third[0]) == list(range(8))


def test_what_cannot_be_clipped_or_stepped_is_refused_on_every_rank() -> None:
    def rank_main(rank: int, world_size: int) -> bool:
        fabric = make_fabric(rank, world_size, {"expert_parallel_size": 2})
        model = small_gpt()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = {key: value[None] for key, value in RandomTokens(1)[0].items()}
        fabric.backward(loss_of(model, batch) * (float("inf") if rank else 1.0))
        assert not torch.isfinite(fabric.strategy.grad_norm())
        with pytest.raises(RuntimeError, match=r"The norm of the gradients is (nan|inf), so they cannot be clipped"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        with pytest.raises(RuntimeError, match=r"call `fabric\.backward\(loss\)` instead of"):
            loss_of(model, batch).backward()
        sharded = make_fabric(rank, world_size, {"expert_parallel_size": 2, **SHARD})
        model = small_gpt()
        with pytest.raises(ValueError, match=r"fused=True in group 0 of AdamW, whose parameters are spread"):
            sharded.setup(model, torch.optim.AdamW(model.parameters(), fused=True))
        return True

    assert all(run_ranks(2, rank_main))


def test_gradient_scalers_agree_on_overflows() -> None:
    def rank_main(rank: int, world_size: int) -> None:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        strategy = FabricParmStrategy(expert_parallel_size=2, calibrate=False)
        plugins = [ForkedEnvironment(rank, world_size), plugin]
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
        fabric.launch()
        model = nn.Linear(2, 2)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(plugin.scaler, AgreedGradScaler)
        before, scale = model.weight.detach().clone(), plugin.scaler.get_scale()
        plugin.scaler.scale(torch.ones(()))  # what makes the scaler's tensors
        model.weight.grad = torch.full((2, 2), float("inf") if rank else 1.0)
        optimizer.step()
        assert torch.equal(model.weight, before), "a rank overflowed, so no rank steps"
        assert plugin.scaler.get_scale() < scale

    run_ranks(2, rank_main)


@pytest.mark.parametrize(("name", "preset"), VARIANTS.items())
def test_every_variant_is_a_name(name: str, preset: dict[str, str]) -> None:
    strategy = Fabric(strategy=name, accelerator="cpu", devices=2).strategy
    assert isinstance(strategy, FabricParmStrategy)
    assert strategy.schedule == preset.get("schedule", "auto")
    assert strategy._start_method == preset.get("start_method", "popen")


def test_wrong_sizes_and_questions_asked_too_early() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        Fabric(strategy=FabricParmStrategy(tensor_parallel_size=3), accelerator="cpu", devices=4)
    with pytest.raises(RuntimeError, match=r"strategy\.topology exists once fabric\.launch\(\) has set up"):
        _ = Fabric(strategy="parm", accelerator="cpu", devices=2).strategy.topology


def test_arguments_that_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="data_parallel='zero' is unknown; choose 'replicate' or 'shard'"):
        FabricParmStrategy(data_parallel="zero")  # type: ignore[arg-type]
    files_on_a_thread = FabricParmStrategy(async_checkpoint=True, save_distributed_checkpoint=False)
    with pytest.raises(ValueError, match=r"async_checkpoint=True writes directories.*give Fabric Lightning's Async"):
        Fabric(strategy=files_on_a_thread, accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match=r"AsyncCheckpointIO writes files.*ParmStrategy\(async_checkpoint=True\)"):
        Fabric(strategy="parm", accelerator="cpu", devices=2, plugins=AsyncCheckpointIO())


@pytest.mark.parametrize("name", ["parm_spawn", "parm_fork"])
def test_a_function_is_launched_on_ranks_that_fabric_starts(name: str) -> None:
    fabric = Fabric(strategy=name, accelerator="cpu", devices=2)
    assert fabric.launch(trained_sum) == pytest.approx(2 * 8.0)


def trained_sum(fabric: Fabric) -> float:
    """Rank and size are the launcher's; one step on the rank's own number, and the sum over ranks of what came out."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.backward(-model(torch.tensor([[4.0 + 6.0 * fabric.global_rank]])).sum())
    optimizer.step()
    return float(fabric.all_reduce(model.weight.detach().clone(), reduce_op="sum").item())
