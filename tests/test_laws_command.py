"""`arriero check --laws` on a user's own file: law, input and difference, and an exit code for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_llama

PIPELINE = """
from __future__ import annotations

from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.losses import Custom
from arriero.components.recipe import PolicyGradientConfig
from arriero.engine.graph import Graph
from arriero.schemas.messages import Weights


def loss(logprobs_T, tokens):
    return BODY


@dataclass(frozen=True, kw_only=True)
class MineConfig(PolicyGradientConfig):
    pass


def mine(cfg: MineConfig) -> Graph:
    g = Graph("mine")
    weights = g.loop(Weights, staleness=cfg.staleness)
    prompts = g.add(cfg.data, name="prompts")()
    scored = g.add(cfg.reward, name="reward")(g.add(cfg.generator())(prompts, weights))
    batches = g.add(GroupAdvantage(groups=cfg.groups_per_step), name="advantage")(scored)
    own = Custom(function=loss, needs_behaviour=True, ratio_control=False)
    weights.close(g.add(cfg.trainer(own))(batches))
    return g
"""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (
            "-(logprobs_T - tokens.behaviour_T).clamp(max=20).exp() * tokens.advantages_T",
            0,
            "holds to all laws",
        ),
        # The mean over a micro-batch depends on how the batch is cut.
        ("-(logprobs_T - logprobs_T.mean()) * tokens.advantages_T", 1, "split"),
    ],
)
def test_the_laws_are_tried_on_a_loss_in_a_users_file(
    tmp_path: Path, body: str, code: int, said: str
) -> None:
    (tmp_path / "mine.py").write_text(PIPELINE.replace("BODY", body))
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    save_tiny_llama(tmp_path / "tiny")
    command = ["check", "mine.py", "--model", "tiny", "--data", "data.jsonl", "--laws"]
    done = subprocess.run(
        [sys.executable, "-m", "arriero", *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.startswith("trainer.loss: ")
    assert said in done.stdout
