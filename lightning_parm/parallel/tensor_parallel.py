"""Dense layers cut over tensor-parallel ranks, by a plan of the module's own or of a Hugging Face model in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_parm.moe import MoE
from lightning_parm.parallel.placement import moe_layers
from lightning_parm.parallel.randomness import draw_differently_inside

#: Hugging Face's names of styles. Norms of single heads see this rank's heads, in the last but one dim.
STYLES: dict[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": SequenceParallel(use_local_output=True),
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=-2, use_local_output=True),
}


def cut_dense_layers(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut dense layers over ``mesh``, unless that was done; a module without a plan stays whole, with a warning.

    The plan maps module names to :class:`torch.distributed.tensor.parallel.ParallelStyle` and is the module's
    ``tensor_parallel_plan``: an attribute, a property or a method. Without one, the plans of Hugging Face models inside
    are taken, see :func:`hugging_face_plan`; what those drop between a layer that cuts activations and the one that
    joins them, attention probabilities above all, each rank then draws for itself.

    Args:
        module: The model; it is changed in place.
        mesh: The tensor-parallel ranks.

    Raises:
        ValueError: If a Hugging Face plan cannot be followed.
    """
    if mesh.size() == 1 or any(isinstance(p, DTensor) for p in module.parameters()):
        return
    plan = getattr(module, "tensor_parallel_plan", None)
    plan = plan() if callable(plan) else plan
    if not plan:
        plan = hugging_face_plan(module, mesh.size())
        _draw_by_rank_where_cut(module, plan, mesh)
    if plan:
        frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
        parallelize_module(module, mesh, plan)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen)  # torch's SequenceParallel lets them all train
        return
    in_mixtures = {id(p) for _, layer in moe_layers(module) for p in layer.parameters()}
    dense = sum(p.numel() for p in module.parameters() if id(p) not in in_mixtures)
    rank_zero_warn(
        f"tensor_parallel_size={mesh.size()}, but the module has no tensor_parallel_plan: its {dense:,} dense "
        f"parameters are replicated, and each of the {mesh.size()} ranks computes all of every dense layer. Give the "
        "module a tensor_parallel_plan, or set tensor_parallel_size=1."
    )


def hugging_face_plan(module: nn.Module, size: int) -> dict[str, ParallelStyle]:
    """The plans (``_tp_plan``) of all Hugging Face models in ``module``, by the names of its own submodules.

    Entries without a submodule are left out (of experts that a :class:`~lightning_parm.MoE` has replaced), and so are
    layers whose weight is tied to another: cutting one would untie them.

    Args:
        module: Any module.
        size: Ranks over which it is to be cut.

    Raises:
        ValueError: If a style is none of :data:`STYLES`, or the heads of attention cannot be shared out.

    Example:
        >>> hugging_face_plan(nn.Linear(4, 4), size=2)
        {}
    """
    plan: dict[str, ParallelStyle] = {}
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    for prefix, model, styles in _planned(module):
        _check_heads(model, styles, size)
        patterns = {re.compile(re.escape(key).replace(r"\*", r"\d+")): style for key, style in styles.items()}
        for name, child in model.named_modules():
            style = next((style for pattern, style in patterns.items() if pattern.fullmatch(name)), "replicate")
            if style == "replicate" or isinstance(child, MoE) or any(uses[id(p)] > 1 for p in child.parameters()):
                continue
            if style not in STYLES:
                raise ValueError(
                    f"The tensor-parallel plan of {type(model).__name__} has the style {style!r} for {name!r}, but "
                    f"known are only {', '.join(sorted(STYLES))}. Give your LightningModule a tensor_parallel_plan of "
                    "torch's styles instead; a mixture of experts is cut once it is a lightning_parm.MoE."
                )
            plan[f"{prefix}.{name}" if prefix else name] = STYLES[style]
    return plan


def _draw_by_rank_where_cut(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Models of Hugging Face know nothing of ranks: dropout of their heads and hidden features must differ on peers."""
    layers: dict[str, dict[str, list[nn.Module]]] = {}
    for name, style in plan.items():
        of_parent = layers.setdefault(name.rpartition(".")[0], {"cutting": [], "joining": []})
        if style is STYLES["colwise"]:
            of_parent["cutting"].append(module.get_submodule(name))
        elif style is STYLES["rowwise"]:
            of_parent["joining"].append(module.get_submodule(name))
    for parent, of_parent in layers.items():
        if of_parent["cutting"] and of_parent["joining"]:
            draw_differently_inside(module.get_submodule(parent), **of_parent, mesh=mesh)


def _planned(module: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, str]]]:
    """The outermost modules that carry a plan of style names; their parts' plans are in theirs."""
    inside: tuple[str, ...] = ()
    for prefix, child in module.named_modules():
        plan: Any = getattr(child, "_tp_plan", None)
        if isinstance(plan, dict) and plan and hasattr(child, "config") and not prefix.startswith(inside or ("\0",)):
            inside += (f"{prefix}." if prefix else "",)
            yield prefix, child, plan


def _check_heads(model: nn.Module, styles: dict[str, str], size: int) -> None:
    config: Any = getattr(model.config, "get_text_config", lambda: model.config)()
    cuts_heads = any(key.endswith((".q_proj", ".k_proj")) and style == "colwise" for key, style in styles.items())
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if cuts_heads and isinstance(heads, int) and heads % size:
            raise ValueError(
                f"tensor_parallel_size={size} does not divide {name}={heads} of {type(model).__name__}, whose plan "
                "cuts attention by heads; choose a size that does."
            )
