"""The exported names and the constructors' parameters are a promise: changing them must be a decision."""

import inspect

import pytest

import lightning_parm
from lightning_parm.data import TokenLoader

NAMES = {"ElasticDataModule", "ExpertLoad", "MoE", "ParmStrategy", "TokenDataModule", "Topology"}
PARAMETERS = {
    lightning_parm.ParmStrategy: (
        "tensor_parallel_size expert_parallel_size expert_shard_size schedule transport chunks "
        "save_distributed_checkpoint process_group_backend timeout start_method bucket_size_bytes calibrate "
        "data_parallel async_checkpoint verify_steps"
    ),
    lightning_parm.Topology: "world_size rank tensor_parallel_size expert_parallel_size expert_shard_size",
    lightning_parm.MoE: (
        "model_dim hidden_dim num_experts top_k capacity_factor activation router num_shared_experts "
        "balance_loss_weight z_loss_weight sequence_parallel"
    ),
    lightning_parm.TokenDataModule: (
        "sources sequence_length batch_size weights delimiter seed num_logical_shards num_workers validation"
    ),
    TokenLoader: "sources sequence_length batch_size rank size",
}


def test_exported_names() -> None:
    assert set(lightning_parm.__all__) == NAMES
    for name in lightning_parm.__all__:
        assert getattr(lightning_parm, name).__doc__


@pytest.mark.parametrize("cls", PARAMETERS, ids=lambda cls: cls.__name__)
def test_constructor_parameters(cls: type) -> None:
    parameters = inspect.signature(cls).parameters
    promised = PARAMETERS[cls].split()
    assert list(parameters)[: len(promised)] == promised, "promised parameters keep their places"
    for name, parameter in list(parameters.items())[len(promised) :]:
        assert parameter.default is not inspect.Parameter.empty, f"{name} follows the promised ones without a default"
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD
