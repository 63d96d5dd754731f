"""Every pipeline is short, builds and checks without torch, and survives its JSON."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import arriero.pipelines
from arriero.components.optimizer import AdamW
from arriero.components.prompts import PromptSource
from arriero.components.sampling import Sampling
from arriero.components.supervised import ExampleSource
from arriero.engine.errors import GraphError
from arriero.engine.graph import Graph
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.pipelines.grpo import GRPOConfig, grpo
from arriero.pipelines.sft import SFTConfig, sft
from tests.tiny_models import save_tiny_llama

PIPELINES = sorted(p for p in Path(arriero.pipelines.__path__[0]).glob("*.py") if p.stem != "__init__")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_tiny_llama(tmp_path / "tiny"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{n}=", "answer": str(n), "response": str(n)} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.stem)
def test_a_pipeline_has_less_than_sixty_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    assert hasattr(importlib.import_module(f"arriero.pipelines.{path.stem}"), path.stem)


def test_pipelines_build_without_torch() -> None:
    code = (
        "import sys; from arriero.pipelines import aipo, grpo, sft; "
        "print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_json_and_back_gives_the_same_graph(model: str, data: str) -> None:
    graphs = [
        aipo(AIPOConfig(model=model, data=PromptSource(path=data), generators=4, staleness=3)),
        grpo(GRPOConfig(model=model, data=PromptSource(path=data), ranks=2)),
        sft(SFTConfig(model=model, data=ExampleSource(path=data), optimizer=AdamW(lr=1e-3))),
    ]
    for graph in graphs:
        spec = graph.check()
        again = Graph.from_spec(type(spec).model_validate_json(spec.model_dump_json()))
        assert again.check() == spec
        assert again.check().digest == spec.digest
        assert again.nodes["trainer"].component == graph.nodes["trainer"].component


def refused(config: AIPOConfig) -> str:
    with pytest.raises(GraphError) as error:
        aipo(config).check()
    return str(error.value)


def test_check_refuses_what_cannot_train(model: str, data: str) -> None:
    prompts = PromptSource(path=data)
    one = refused(AIPOConfig(model=model, data=prompts, samples=1))
    assert "samples=1" in one
    nucleus = refused(AIPOConfig(model=model, data=prompts, sampling=Sampling(top_p=0.9)))
    assert "trainer" in nucleus
    assert "top_p=0.9" in nucleus
    ranks = refused(AIPOConfig(model=model, data=prompts, groups_per_step=6, ranks=4))
    assert "6 records" in ranks
    assert "4 ranks" in ranks
    both = refused(
        AIPOConfig(model=model, data=PromptSource(path="none.jsonl"), sampling=Sampling(greedy=True))
    )
    assert "none.jsonl" in both
    assert "greedy" in both


def test_grpo_is_synchronous_and_aipo_one_step_behind(model: str, data: str) -> None:
    prompts = PromptSource(path=data)
    assert grpo(GRPOConfig(model=model, data=prompts)).spec().loops[0].staleness == 0
    assert aipo(AIPOConfig(model=model, data=prompts)).spec().loops[0].staleness == 1
