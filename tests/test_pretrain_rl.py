"""Pretraining, fine-tuning and reinforcement learning one after the other: each learns its own thing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from arriero.components.mixture import ExampleMixture, Part
from arriero.components.optimizer import AdamW
from arriero.components.supervised import ExampleSource
from arriero.launchers.cli import main
from arriero.launchers.rundir import RunDir
from arriero.pipelines.sft import SFTConfig, sft
from tests.drive import kept, outputs
from tests.inline_runs import steps_of, tiny_model

torch.set_num_threads(1)

CONFIG = """
model = "unset"
data = "{path}/questions.jsonl"
steps = 12
groups_per_step = 8
samples = 8
slots = 64
staleness = 0
[sampling]
max_new_tokens = 3
[optimizer]
lr = 1e-2
[reward]
kind = "contains"
text = "3"
[pretrain]
steps = 40
examples_per_step = 16
[pretrain.optimizer]
lr = 1e-2
[[pretrain.data.parts]]
path = "{path}/counting.jsonl"
prompt_field = ""
response_field = "text"
weight = 3
[[pretrain.data.parts]]
path = "{path}/letters.jsonl"
prompt_field = ""
response_field = "text"
[sft]
steps = 30
examples_per_step = 16
[sft.optimizer]
lr = 5e-3
[[sft.data.parts]]
path = "{path}/answers.jsonl"
"""


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(path: Path) -> Path:
    write(path / "counting.jsonl", [{"text": f"{a}+{b}={a + b}"} for a in range(4) for b in range(5)])
    write(path / "letters.jsonl", [{"text": "(" * n + ")" * n} for n in range(1, 6)])
    digits = "012345"
    write(path / "answers.jsonl", [{"prompt": f"{n}=", "response": digits[n % 6]} for n in range(60)])
    write(path / "questions.jsonl", [{"prompt": f"{n}="} for n in range(20)])
    file = path / "stages.toml"
    file.write_text(CONFIG.format(path=path))
    return file


def run(stage: str, model: str, config: Path, run_dir: Path) -> list[dict[str, float]]:
    command = ["run", "pretrain_rl", "--config", str(config), "--stage", stage, "--model", model]
    assert main([*command, "--run-dir", str(run_dir), "--inline", "--deterministic", "--quiet"]) == 0
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_three_stages_learn_one_after_the_other_and_know_where_they_come_from(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    folders = {stage: tmp_path / f"prl-{stage}" for stage in ("pretrain", "sft", "rl")}
    first = run("pretrain", tiny_model(tmp_path / "random"), config, folders["pretrain"])
    # From scratch: log 32 nats a token, all ids alike.
    assert first[0]["loss"] == pytest.approx(np.log(32), abs=0.1)
    assert first[-1]["loss"] < 1.8
    second = run("sft", str(folders["pretrain"] / "model"), config, folders["sft"])
    assert second[-1]["loss"] < 0.6 * second[0]["loss"]
    third = run("rl", str(folders["sft"] / "model"), config, folders["rl"])
    # One answer of six has the digit; reinforcement turns it up.
    assert third[0]["reward"] < 0.5
    assert np.mean([s["reward"] for s in third[-3:]]) > 0.8
    manifests = {stage: RunDir(folder).read_manifest() for stage, folder in folders.items()}
    assert manifests["pretrain"].ancestors == ()
    for stage, before in (("sft", "pretrain"), ("rl", "sft")):
        (ancestor,) = manifests[stage].ancestors
        assert (ancestor.option, ancestor.run_id) == ("model", manifests[before].run_id)
        assert ancestor.run_dir == str(folders[before])
        assert ancestor.pipeline == "arriero.pipelines.pretrain_rl:pretrain_rl"
    assert len({m.ancestors[0].sha256 for m in manifests.values() if m.ancestors}) == 2


async def test_a_mixture_keeps_its_shares_at_every_point(tmp_path: Path) -> None:
    for name, size in (("a", 40), ("b", 40), ("c", 3)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": "?", "response": name} for _ in range(size)])
    parts = tuple(
        Part(path=str(tmp_path / f"{n}.jsonl"), weight=w, epochs=1) for n, w in (("a", 5), ("b", 3), ("c", 2))
    )
    found = kept(await outputs(ExampleMixture(parts=parts).run()))
    names = [e.response for e in found]
    assert Counter(names[:10]) == {"a": 5, "b": 3, "c": 2}
    assert Counter(names) == {"a": 40, "b": 40, "c": 3}  # the part that ends leaves its share to the others
    assert len({e.id for e in found}) == 83


def test_fine_tuning_learns_its_demonstrations(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", [{"prompt": f"{n}=", "response": str(n % 3)} for n in range(30)])
    config = SFTConfig(
        model=tiny_model(tmp_path / "tiny"),
        data=ExampleSource(path=str(tmp_path / "answers.jsonl")),
        optimizer=AdamW(lr=1e-2),
        steps=25,
        examples_per_step=16,
    )
    steps = steps_of(sft(config), tmp_path / "fine-tuned")
    # At first all 32 ids are alike; of what is learned, the digit has one bit and a half, its end nothing.
    assert steps[0]["loss"] == pytest.approx(np.log(32), abs=0.1)
    assert np.mean([s["loss"] for s in steps[-3:]]) < 0.8
