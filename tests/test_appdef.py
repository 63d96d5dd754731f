"""A graph becomes a TorchX app: which roles, which programs, how many threads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torchx.specs import AppDef

from arriero.engine.errors import GraphError
from arriero.launchers.appdef import app_def, thread_counts, visible_devices
from arriero.schemas.graph import GraphSpec
from arriero.schemas.run import RunOptions
from tests.toys import toy_graph

OPTIONS = RunOptions(run_id="r")


def app(spec: GraphSpec, options: RunOptions = OPTIONS, cores: int = 8) -> AppDef:
    return app_def(spec, options, Path("/runs/r"), port=4222, cores=cores)


def test_the_hub_is_the_first_role_and_every_role_of_the_graph_follows() -> None:
    roles = app(toy_graph(generators=3).check()).roles
    assert [r.name for r in roles] == ["hub", "prompts", "generator", "reward", "collect", "trainer"]
    assert [r.num_replicas for r in roles] == [1, 1, 3, 1, 1, 1]


def test_a_role_of_one_rank_is_a_python_program_that_knows_its_replica() -> None:
    generator = app(toy_graph().check()).roles[2]
    assert generator.entrypoint == sys.executable
    assert " ".join(generator.args) == (
        "-m arriero.launchers.role --run-dir /runs/r --role generator --replica ${replica_id}"
    )
    assert generator.env["ARRIERO_REPLICA"] == "generator-${replica_id}"


def test_a_role_of_several_ranks_runs_under_torchrun() -> None:
    trainer = app(toy_graph(ranks=2).check()).roles[5]
    command = " ".join(trainer.args)
    assert command.startswith("-m torch.distributed.run --nnodes 1 --nproc-per-node 2 ")
    assert "--rdzv-backend c10d --rdzv-endpoint localhost:0 -m arriero.launchers.role" in command
    assert trainer.num_replicas == 1


def test_the_hub_gets_the_port() -> None:
    assert app(toy_graph().check()).roles[0].args[-2:] == ["--port", "4222"]


def test_roles_that_compute_share_the_cores_and_the_others_get_one_thread() -> None:
    # Only the toy trainer computes: 8 cores for its 2 ranks.
    assert thread_counts(toy_graph(ranks=2).check(), OPTIONS, 8) == {
        "prompts": 1,
        "generator": 1,
        "reward": 1,
        "collect": 1,
        "trainer": 4,
    }


def test_a_computing_role_has_a_thread_when_there_are_more_processes_than_cores() -> None:
    assert thread_counts(toy_graph(ranks=4).check(), OPTIONS, 2)["trainer"] == 1


def test_threads_may_be_given_by_role() -> None:
    options = RunOptions(run_id="r", threads={"generator": 3})
    generator = app(toy_graph().check(), options).roles[2]
    assert generator.env["OMP_NUM_THREADS"] == generator.env["MKL_NUM_THREADS"] == "3"


def test_nodes_of_one_role_must_have_one_shape() -> None:
    spec = toy_graph(generators=2).check()
    together = spec.model_copy(
        update={"nodes": tuple(n.model_copy(update={"role": "all"}) for n in spec.nodes)}
    )
    with pytest.raises(GraphError, match=r"role all: .* differ .* \(prompts 1 x 1, generator 2 x 1"):
        app(together)


def test_no_role_may_be_named_like_the_hub() -> None:
    spec = toy_graph().check()
    named = spec.model_copy(
        update={"nodes": (spec.nodes[0].model_copy(update={"role": "hub"}), *spec.nodes[1:])}
    )
    with pytest.raises(GraphError, match="hub is taken"):
        app(named)


def test_each_rank_that_computes_gets_a_gpu_of_its_own_and_the_others_see_none() -> None:
    found = visible_devices(toy_graph(ranks=2).check(), ["0", "1", "2", "3"])
    assert found["trainer-0"] == "0,1"
    assert found["generator-0"] == found["reward-0"] == ""


def test_too_few_gpus_are_shared_and_none_are_not_spoken_of() -> None:
    assert visible_devices(toy_graph(ranks=4).check(), ["GPU-a", "GPU-b"])["trainer-0"] == "GPU-a,GPU-b"
    assert visible_devices(toy_graph().check(), []) == {}
