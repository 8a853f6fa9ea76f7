"""``Trainer(strategy="parm")`` works after one import, and users of the other namespace are told what to change."""

import sys

import lightning as L
import pytest
from distributed import run_command

from lightning_parm import ParmStrategy
from lightning_parm.registration import VARIANTS, register


@pytest.mark.parametrize(("name", "preset"), VARIANTS.items())
def test_every_variant_is_a_name(name: str, preset: dict[str, str]) -> None:
    strategy = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, ParmStrategy)
    assert strategy.schedule == preset.get("schedule", "auto")
    assert strategy._start_method == preset.get("start_method", "popen")


def test_registering_again_changes_nothing() -> None:
    register()
    assert isinstance(L.Trainer(strategy="Parm", accelerator="cpu", devices=1, logger=False).strategy, ParmStrategy)


@pytest.mark.parametrize(
    "imports",
    ["import lightning_parm, pytorch_lightning as pl", "import pytorch_lightning as pl, lightning_parm"],
    ids=["ours first", "ours last"],
)
def test_a_trainer_of_the_other_namespace_gets_one_sentence(imports: str) -> None:
    script = f"{imports}\npl.Trainer(strategy='parm', accelerator='cpu', devices=2, logger=False)"
    result = run_command([sys.executable, "-c", script], timeout=120)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith('RuntimeError: strategy="parm" needs a Trainer of `lightning`')
    assert "replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl`" in last


def test_a_module_of_the_other_namespace_gets_one_sentence() -> None:
    script = (
        "import lightning_parm, lightning as L, pytorch_lightning as pl\n"
        "L.Trainer(strategy='parm', accelerator='cpu', devices=1, logger=False).fit(pl.LightningModule())"
    )
    result = run_command([sys.executable, "-c", script], timeout=120)
    assert "You passed a `pytorch_lightning` object (LightningModule) to a `lightning.pytorch` Trainer" in result.stderr


def test_sizes_that_do_not_multiply_fail_in_the_constructor() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        L.Trainer(strategy=ParmStrategy(tensor_parallel_size=3), accelerator="cpu", devices=4, logger=False)
    with pytest.raises(ValueError, match="expert_parallel_size=3"):
        L.Trainer(
            strategy=ParmStrategy(tensor_parallel_size=2, expert_parallel_size=3),
            accelerator="cpu",
            devices=4,
            logger=False,
        )


def test_topology_is_not_there_before_the_processes() -> None:
    trainer = L.Trainer(strategy="parm", accelerator="cpu", devices=2, logger=False)
    with pytest.raises(RuntimeError, match=r"strategy\.topology exists once the Trainer has set up"):
        _ = trainer.strategy.topology
