"""Makes ``"parm"`` known to the Trainer and to Fabric, and tells users of ``pytorch_lightning`` what to change."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_parm.fabric import FabricParmStrategy
from lightning_parm.strategy import ParmStrategy

FOREIGN = "pytorch_lightning.strategies"

#: Name of each variant and what it presets.
VARIANTS: dict[str, dict[str, Any]] = {
    "parm": {},
    "parm_s0": {"schedule": "s0"},
    "parm_s1": {"schedule": "s1"},
    "parm_s2": {"schedule": "s2"},
    "parm_spawn": {"start_method": "spawn"},
    "parm_fork": {"start_method": "fork"},
    "parm_notebook": {"start_method": "fork"},
}


def _refuse(**_: Any) -> NoReturn:
    raise RuntimeError(
        'strategy="parm" needs a Trainer of `lightning`, and this one is of `pytorch_lightning`, whose classes are '
        "unrelated although their names are the same: replace `import pytorch_lightning as pl` by "
        "`import lightning.pytorch as pl`."
    )


def _register_refusal() -> None:
    registry = sys.modules[FOREIGN].StrategyRegistry
    for name in VARIANTS:
        registry.register(name, _refuse, description="needs `lightning`", override=True)


class _ForeignFinder(MetaPathFinder):
    """Waits for an import of ``pytorch_lightning`` that comes after ours; it changes nothing but that registry."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != FOREIGN:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register_refusal()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register ``parm`` and its variants; calling it again changes nothing."""
    for name, preset in VARIANTS.items():
        described = ", ".join(f"{key}={value!r}" for key, value in preset.items()) or "defaults"
        StrategyRegistry.register(name, ParmStrategy, description=f"ParmStrategy: {described}", override=True, **preset)
        STRATEGY_REGISTRY.register(
            name, FabricParmStrategy, description=f"FabricParmStrategy: {described}", override=True, **preset
        )
    if FOREIGN in sys.modules:
        _register_refusal()
    elif not any(isinstance(finder, _ForeignFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ForeignFinder())
