"""Every refusal of the graph check: one line that names the thing, the value and the remedy."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.generator import Generator
from arriero.components.losses import AIPO, CrossEntropy, Reinforce
from arriero.components.prompts import PromptSource
from arriero.components.sampling import Sampling
from arriero.components.trainer import Trainer
from arriero.engine.broker import EdgeDecl
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph, Rates, each
from arriero.engine.memory import MemoryBroker
from arriero.engine.rates import capacities
from arriero.engine.runtime import run_role
from arriero.schemas.graph import Capacity, GraphSpec
from arriero.schemas.ledger import loop_log
from arriero.schemas.messages import Outcome, Prompt, RolloutGroup, Score, ScoredGroup, Weights
from arriero.schemas.run import RunOptions
from tests.graphs import Follower, Join, Source, Stage, Versions, chain, fork, looped


def problems(graph: Graph) -> list[str]:
    """The lines of what `check` raises; none if it raises nothing."""
    try:
        graph.check()
    except GraphError as error:
        return str(error).splitlines()
    return []


def all_right(group: RolloutGroup) -> ScoredGroup:
    """Every rollout is right."""
    return ScoredGroup(group=group, scores=(Score(value=1.0, outcome=Outcome.OK),) * len(group.rollouts))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """What the check reads of a model: its files are there, and its context has 64 tokens."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 8)
    return str(tmp_path)


def training(
    model: str,
    *,
    generator: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    advantage: dict[str, Any] | None = None,
    staleness: int = 1,
    ranks: int = 1,
) -> Graph:
    """The graph of a policy-gradient pipeline, of the real components."""
    g = Graph("training")
    weights = g.loop(Weights, staleness=staleness)
    prompts = g.add(PromptSource(path=f"{model}/data.jsonl"), name="prompts")()
    sampler: dict[str, Any] = {"model": model, "samples": 4, "sampling": Sampling(max_new_tokens=32)}
    rollouts = g.add(Generator(**sampler | (generator or {})))(prompts, weights)
    scored = g.add(each(all_right), name="reward")(rollouts)
    gathers: dict[str, Any] = {"groups": 4}
    batches = g.add(GroupAdvantage(**gathers | (advantage or {})), name="advantage")(scored)
    optimizes: dict[str, Any] = {"model": model, "loss": AIPO(), "steps": 2}
    trained = Trainer(**optimizes | (trainer or {}))
    weights.close(g.add(trained, ranks=ranks)(batches))
    return g


def test_a_graph_of_real_components_passes(model: str) -> None:
    assert problems(training(model)) == []
    assert problems(training(model, trainer={"loss": Reinforce()}, staleness=0)) == []


def test_an_empty_graph_is_refused() -> None:
    assert problems(Graph("nothing")) == ["graph nothing is empty; add components to it"]


def test_an_open_loop_is_refused() -> None:
    g = Graph("g")
    g.add(Follower())(g.add(Source())(), g.loop(Weights, staleness=1))
    assert problems(g) == [
        "loop weights is never closed; call weights.close(...) with the stream of its versions"
    ]


def test_a_loop_that_nobody_reads_is_refused() -> None:
    g = Graph("g")
    weights = g.loop(Weights, staleness=1)
    weights.close(g.add(Versions())(g.add(Source())()))
    assert problems(g) == [
        "loop weights is closed by versions but nobody reads it; remove it or pass it to a component"
    ]


def test_a_component_that_was_added_but_not_connected_is_refused() -> None:
    g = chain((1, 1))
    g.add(Stage(), name="forgotten")
    assert problems(g) == [
        "forgotten is added but not connected; call what `add` returned on its input streams"
    ]
    alone = Graph("alone")
    alone.add(Stage(), name="forgotten")
    assert problems(alone)[0].startswith("forgotten is added but not connected")


def test_parts_that_are_not_connected_are_refused() -> None:
    g = chain((1, 1))
    g.add(Source(), name="other")()
    assert problems(g) == ["other: not connected to source; use one graph for each part"]


def test_a_second_source_is_refused() -> None:
    g = Graph("joined")
    g.add(Join(), name="join")(g.add(Source(), name="easy")(), g.add(Source(), name="hard")())
    assert problems(g) == [
        "easy, hard are 2 sources; a graph has one: mix the data in a component",
    ]


def test_ranks_that_follow_a_loop_are_refused() -> None:
    assert problems(with_field(looped((1, 1)), "ranks", {"follower": 2})) == [
        "follower: it follows a loop, so it has one rank, not 2; use replicas"
    ]


def test_streams_and_loops_of_another_graph_are_refused() -> None:
    g, other = Graph("g"), Graph("other")
    weights = other.loop(Weights, staleness=1)
    stream = g.add(Follower(), name="follower")(other.add(Source(), name="away")(), weights)
    mine = g.loop(Weights, staleness=1)
    mine.close(other.add(Versions(), name="versions")(stream))
    assert problems(g) == [
        "loop weights is closed by versions, not a node of graph g; add it there",
        "follower.prompts reads away, which is not in graph g; streams stay in one graph",
    ]


def test_a_configuration_without_a_json_form_is_refused_by_name() -> None:
    def same(record: Prompt) -> Prompt:
        return record

    (line,) = problems(with_field(chain((1, 1)), "component", {"s0": each(same)}))
    assert line.startswith("s0: fn: test_a_configuration_without")
    assert line.endswith("same can't be imported by name; move it to the top of a module")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"source": 2},
            "source: a source has one replica; 2 would each give all of its records",
        ),
        (
            {"s1": 3},
            "s1: it gathers several records per firing, so it has one replica, not 3; use ranks to split it",
        ),
        ({"versions": 2}, "versions: it closes a loop, so it has one replica, not 2; use ranks"),
    ],
)
def test_replicas_where_they_would_repeat_or_mix_records_are_refused(
    change: dict[str, int], line: str
) -> None:
    assert problems(with_field(looped((1, 1), (4, 1)), "replicas", change)) == [line]


def test_replicas_of_a_join_are_refused() -> None:
    (line,) = problems(with_field(fork(batch=1), "replicas", {"join": 2}))
    assert line.startswith("join: it joins several streams, so it has one replica, not 2")


def test_replicas_and_ranks_together_are_refused() -> None:
    g = with_field(with_field(chain((1, 1)), "replicas", {"s0": 2}), "ranks", {"s0": 4})
    assert problems(g) == [
        "s0: 2 replicas and 4 ranks; replicas compete for records, ranks share each one: raise one of the two"
    ]


@pytest.mark.parametrize("what", ["replicas", "ranks"])
def test_zero_or_fewer_replicas_are_refused_at_once(what: str) -> None:
    with pytest.raises(GraphError, match=f"^stage: {what} is 0; at least 1 is needed$"):
        Graph("g").add(Stage(), **{what: 0})  # type: ignore[arg-type]


def test_nodes_of_one_role_that_differ_in_number_are_refused() -> None:
    g = with_field(
        with_field(chain((1, 1), (1, 1)), "role", {"s0": "both", "s1": "both"}), "replicas", {"s0": 2}
    )
    assert problems(g) == [
        "role both: its nodes differ in replicas (s0 2, s1 1); set them equal or use two roles"
    ]


def test_groups_that_do_not_divide_by_the_ranks_are_refused(model: str) -> None:
    assert problems(training(model, ranks=2)) == []
    assert problems(training(model, ranks=3)) == [
        "trainer: 4 records of prompts per step don't divide by its 3 ranks; use a multiple of 3"
    ]


def test_ranks_without_a_loop_must_divide_too() -> None:
    assert problems(with_field(chain((1, 32), (1, 1)), "ranks", {"s1": 8})) == []
    (line,) = problems(with_field(chain((1, 32), (1, 1)), "ranks", {"s1": 5}))
    assert line.startswith("s1: 32 records of source per step don't divide by its 5 ranks")


def test_a_capacity_below_one_firing_is_refused_at_both_ends() -> None:
    g = chain((4, 6)).with_capacities({"source": Capacity(messages=3)})
    assert problems(g) == [
        "source: capacity 3, but source gives 4 records per firing; use 4 or more",
        "source: capacity 3, but s0.records takes 6 records per firing; use 6 or more",
    ]


def test_a_closing_component_that_takes_several_records_is_refused() -> None:
    assert problems(looped((1, 1), closes=2)) == [
        "versions.records takes 2 records per version of loop weights; gather them in a component before it"
    ]


def test_reconvergent_paths_that_starve_each_other_are_refused() -> None:
    assert problems(fork(batch=32)) == []
    small = {"one": Capacity(messages=8), "source": Capacity(messages=32)}
    assert problems(fork(batch=32).with_capacities(small)) == []
    (line,) = problems(chained_batches().with_capacities({"source": Capacity(messages=8)}))
    assert line.startswith("deadlock: source waits for room on its output (8 of 8 taken)")
    assert line.endswith("raise a capacity or lower what a firing takes")


def chained_batches() -> Graph:
    """Two stages that halve the rate beside one 1:1 branch, and a join: needs 16 prompts at once."""
    g = Graph("chained")
    prompts = g.add(Source(), name="source")()
    one = g.add(Stage(), name="one")(prompts)
    few = g.add(Stage(consumes=4), name="few")(prompts)
    all_again = g.add(Stage(consumes=4, produces=16), name="again")(few)
    g.add(Join(), name="join")(one, all_again)
    return g.with_capacities({"one": Capacity(messages=4)})


def test_rates_that_do_not_balance_are_refused() -> None:
    (line,) = problems(fork(batch=4, right=2))
    assert line.startswith("join.second: many feeds it at 1/2 of the rate its node needs")


def test_rates_for_a_port_that_is_no_edge_are_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Misnamed(Stage):
        def rates(self) -> Rates:
            return Rates(consumes={"record": 2})

    assert problems(with_field(chain((1, 1)), "component", {"s0": Misnamed()})) == [
        "s0: rates() names record; ports with a rate: records"
    ]


def test_all_problems_of_a_step_are_listed_together(model: str) -> None:
    g = training(model, generator={"slots": 2}, trainer={"loss": Reinforce()}, ranks=3)
    lines = problems(with_field(g, "replicas", {"prompts": 2, "advantage": 2}))
    beginnings = [
        "prompts: a source has one replica",
        "advantage: it gathers several records per firing",
        "generator: slots=2 can't hold",
        "trainer: staleness 1 with Reinforce",
        "trainer: 4 records of prompts per step don't divide by its 3 ranks",
    ]
    for begin in beginnings:
        assert sum(line.startswith(begin) for line in lines) == 1, (begin, lines)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_a_group_baseline_with_groups_of_one_is_refused(model: str, baseline: str) -> None:
    lines = problems(
        training(model, generator={"samples": 1}, advantage={"baseline": baseline, "std": baseline == "mean"})
    )
    assert any(line.startswith("advantage:") and "samples=1" in line for line in lines), lines


def test_staleness_with_a_loss_without_ratio_control_is_refused(model: str) -> None:
    lines = problems(training(model, trainer={"loss": Reinforce()}, staleness=1))
    assert any(line.startswith("trainer: staleness 1 with Reinforce") for line in lines), lines


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"greedy": True}])
def test_sampling_whose_log_probabilities_the_trainer_cannot_reproduce_is_refused(
    model: str, sampling: dict[str, Any]
) -> None:
    lines = problems(training(model, generator={"sampling": Sampling(max_new_tokens=32, **sampling)}))
    assert any(line.startswith("trainer:") and "log-prob" in line for line in lines), lines


def test_a_context_without_room_for_a_prompt_is_refused(model: str) -> None:
    lines = problems(training(model, generator={"sampling": Sampling(max_new_tokens=64)}))
    assert any(line.startswith("generator: the context of 64 tokens") for line in lines), lines


def test_a_model_that_is_not_there_is_refused(model: str) -> None:
    lines = problems(training(model, generator={"model": "/nowhere"}))
    assert any(line.startswith("generator: model /nowhere is not a model directory") for line in lines), lines


def test_no_error_has_an_empty_remedy(model: str) -> None:
    wrong = [
        training(model, generator={"samples": 1, "slots": 1}, trainer={"loss": CrossEntropy()}, ranks=3),
        fork(batch=4, right=2),
        with_field(looped((1, 1), (4, 1)), "replicas", {"source": 2, "s1": 2, "versions": 2}),
    ]
    for graph in wrong:
        for line in problems(graph):
            assert len(line) < 300
            assert any(mark in line for mark in (";", ":")), line


def with_field(graph: Graph, field: str, values: dict[str, Any]) -> Graph:
    """The same graph with one field of the named nodes changed, past the checks of `add`."""
    for name, value in values.items():
        graph.nodes[name] = replace(graph.nodes[name], **{field: value})
    return graph


async def run_in_memory(spec: GraphSpec, run_dir: Path) -> dict[str, int]:
    """Run all roles in this process to their end; the records that are left on each edge."""
    broker, room = MemoryBroker(), capacities(spec)
    edges = [
        EdgeDecl(
            name=n.name, groups=tuple(f"{c.name}-{i.port}" for c, i in readers), producers=n.replicas,
            capacity=room[n.name],
        )
        for n in spec.nodes
        if (readers := spec.consumers(n.name))
    ]  # fmt: skip
    await broker.declare(edges, ["ledger", "control", *(loop_log(loop.name) for loop in spec.loops)])
    options = RunOptions(run_id="test", wait_bound_s=5)
    await asyncio.gather(
        *(
            run_role(spec, options, role=role, replica=k, run_dir=run_dir, broker=broker.connect())
            for role, nodes in spec.roles.items()
            for k in range(nodes[0].replicas)
        )
    )
    left = {e.name: (await broker.depth(e.name)).messages for e in edges}
    await broker.close()
    return left


@settings(max_examples=25)
@given(
    takes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    staleness=st.integers(0, 2),
    room=st.integers(1, 12),
)
def test_an_accepted_graph_runs_to_its_end(
    tmp_path_factory: pytest.TempPathFactory,
    takes: list[int],
    staleness: int,
    room: int,
) -> None:
    # Stages that give one record each: a prompt may end in one version only.
    g = looped(*((taken, 1) for taken in takes), staleness=staleness)
    g = g.with_capacities({n: Capacity(messages=room) for n in g.nodes})
    if problems(g):
        return
    left = asyncio.run(run_in_memory(g.spec(), tmp_path_factory.mktemp("run")))
    assert set(left.values()) == {0}
