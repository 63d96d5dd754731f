"""The graph for people: valid SVG and Mermaid with every name in it, and the table of who waits for whom."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.components.prompts import PromptSource
from arriero.engine.graph import Graph
from arriero.engine.picture import mermaid, svg, table
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.graph import GraphSpec
from arriero.schemas.messages import Weights
from tests.graphs import Follower, Source, Stage, Versions, chain, fork, looped

ROOT = Path(__file__).resolve().parents[1]
SVG = "{http://www.w3.org/2000/svg}"


def example() -> GraphSpec:
    """The graph of the image in the documentation."""
    data = PromptSource(path="data.jsonl")
    config = AIPOConfig(model="model", data=data, groups_per_step=32, generators=4, rewards=2, ranks=2)
    return aipo(config).spec()


def two_loops() -> GraphSpec:
    g = Graph("two")
    first, second = g.loop(Weights, staleness=0, name="policy"), g.loop(Weights, staleness=2, name="value")
    prompts = g.add(Follower(), name="actor")(g.add(Source(), name="source")(), first)
    valued = g.add(Follower(), name="critic")(prompts, second)
    first.close(g.add(Versions(), name="actortrainer")(valued))
    second.close(g.add(Versions(), name="critictrainer")(valued))
    return g.spec()


GRAPHS = [example(), two_loops(), fork(batch=4).spec(), looped((1, 1), (8, 1)).spec(), chain((2, 3)).spec()]


def texts(picture: str) -> list[str]:
    return [t.text or "" for t in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("spec", GRAPHS, ids=lambda spec: spec.name)
def test_the_svg_is_xml_and_names_every_node_record_and_loop(spec: GraphSpec) -> None:
    found = texts(svg(spec))
    for n in spec.nodes:
        assert sum(text.startswith(n.name) for text in found) >= 1
        assert n.component.rpartition(":")[2] in found
        for i in n.inputs:
            assert any(i.record.rpartition(":")[2] in text for text in found)
    for loop in spec.loops:
        assert f"Weights, staleness ≤ {loop.staleness}" in found


def boxes(picture: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of every box of a node; cards behind one in a pile left out."""
    root = ElementTree.fromstring(picture)
    found: list[tuple[float, float, float, float]] = []
    for rect in list(root.iter(f"{SVG}rect"))[1:]:  # the first is the background
        x, y, width, height = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        found.append((x, y, x + width, y + height))
    fronts = [b for k, b in enumerate(found) if k + 1 == len(found) or found[k + 1][0] != b[0] - 4]
    assert all(x >= 0 and x2 <= float(root.attrib["width"]) for x, _, x2, _ in fronts)
    assert all(y >= 0 and y2 <= float(root.attrib["height"]) for _, y, _, y2 in fronts)
    return fronts


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), min_size=1, max_size=8))
def test_boxes_never_overlap_and_hold_their_names(stages: list[tuple[int, int]]) -> None:
    g = Graph("any")
    streams = [g.add(Source(), name="source")()]
    for k, (reads, letters) in enumerate(stages):
        name = f"s{k}" + "x" * (letters - 2)
        streams.append(g.add(Stage(), name=name)(streams[reads % len(streams)]))
    found = boxes(svg(g.spec()))
    assert len(found) == len(g.nodes)
    for k, (x1, y1, x2, y2) in enumerate(found):
        assert x2 - x1 >= 6.8 * max(map(len, g.nodes))
        for other in found[:k]:
            assert x1 >= other[2] or x2 <= other[0] or y1 >= other[3] or y2 <= other[1]


def test_labels_are_escaped() -> None:
    spec = chain((1, 1)).spec()
    odd = spec.nodes[0].model_copy(update={"component": 'm:<A&"B>'})
    picture = svg(spec.model_copy(update={"nodes": (odd, spec.nodes[1]), "name": "a<b"}))
    assert '<A&"B>' in texts(picture)
    assert ElementTree.fromstring(picture)[0].text == "a<b"


def test_copies_are_counted_beside_the_name() -> None:
    g = chain((1, 1), (1, 1))
    g.nodes["s0"] = dataclasses.replace(g.nodes["s0"], replicas=3)
    g.nodes["s1"] = dataclasses.replace(g.nodes["s1"], ranks=8)
    assert {"s0 ×3", "s1 (8 ranks)"} <= set(texts(svg(g.spec())))


@pytest.mark.parametrize("spec", GRAPHS, ids=lambda spec: spec.name)
def test_mermaid_has_every_node_once_and_every_edge(spec: GraphSpec) -> None:
    first, *lines = mermaid(spec).splitlines()
    assert first == "flowchart LR"
    nodes = [m for line in lines if (m := re.fullmatch(r'    n_(\w+)\["[^"]+"\]', line))]
    edges = [m for line in lines if (m := re.fullmatch(r"    n_(\w+) (-->|-\.->)\|([^|]+)\| n_(\w+)", line))]
    assert len(nodes) + len(edges) == len(lines)
    assert [m[1] for m in nodes] == [n.name for n in spec.nodes]
    expected = {(i.source, "-->", n.name) for n in spec.nodes for i in n.inputs if not i.loop}
    closed = {loop.name: loop.producer for loop in spec.loops}
    expected |= {(closed[i.source], "-.->", n.name) for n in spec.nodes for i in n.inputs if i.loop}
    assert {(m[1], m[2], m[4]) for m in edges} == expected


def test_the_mermaid_of_a_graph() -> None:
    assert mermaid(looped((4, 1), staleness=2).spec()) == (
        "flowchart LR\n"
        '    n_source["source<br/><small>Source</small>"]\n'
        '    n_follower["follower<br/><small>Follower</small>"]\n'
        '    n_s0["s0<br/><small>Stage</small>"]\n'
        '    n_versions["versions<br/><small>Versions</small>"]\n'
        "    n_source -->|Prompt| n_follower\n"
        "    n_follower -->|4 Prompt| n_s0\n"
        "    n_s0 -->|Prompt| n_versions\n"
        "    n_versions -.->|Weights, staleness ≤ 2| n_follower\n"
    )


def test_the_table_of_aipo() -> None:
    header, *rows = table(example())
    assert header == ("node", "consumes", "produces", "waits for", "unblocked by")
    # 32 groups a step and staleness 1: 64 prompts may be under way, and every edge before the batch holds 64.
    assert rows == [
        (
            "prompts",
            "-",
            "1 Prompt",
            "admission by weights: (version + 1 + 1) * 32; room on its edge (64 records)",
            "trainer, generator",
        ),
        (
            "generator",
            "1 Prompt, 1 Weights",
            "1 RolloutGroup",
            "1 of prompts; a version through weights; room on its edge (64 records)",
            "prompts, trainer, reward",
        ),
        (
            "reward",
            "1 RolloutGroup",
            "1 ScoredGroup",
            "1 of generator; room on its edge (64 records)",
            "generator, advantage",
        ),
        (
            "advantage",
            "32 ScoredGroup",
            "1 Batch",
            "32 of reward; room on its edge (16 records)",
            "reward, trainer",
        ),
        ("trainer", "1 Batch", "1 Weights", "1 of advantage", "advantage"),
    ]


def test_the_image_in_the_documentation_is_up_to_date() -> None:
    # After a change of the picture: python -c "from tests.test_picture import write; write()"
    assert (ROOT / "docs" / "images" / "aipo.svg").read_text(encoding="utf-8") == svg(example())


def write() -> None:
    """Draw the image of the documentation anew."""
    path = ROOT / "docs" / "images" / "aipo.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text(svg(example()), encoding="utf-8")
