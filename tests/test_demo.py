"""The demo and its parts: what it writes, and that the whole of it learns."""

# pyright: reportUnknownMemberType=false
# The tokenizers of transformers are annotated only in part.

from __future__ import annotations

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from arriero.components.training import load_policy
from arriero.launchers.demo import write_data
from arriero.launchers.demo_model import write_tiny_llama


def test_half_of_the_labels_are_wrong_in_one_letter(tmp_path: Path) -> None:
    write_data(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "supervised.jsonl").read_text().splitlines()]
    wrong = [sum(a != b for a, b in zip(r["prompt"][3::-1], r["response"], strict=True)) for r in rows]
    assert set(wrong) == {0, 1}
    assert 0.45 < sum(wrong) / len(wrong) < 0.55
    train = {json.loads(line)["prompt"] for line in (tmp_path / "train.jsonl").read_text().splitlines()}
    held_out = {json.loads(line)["prompt"] for line in (tmp_path / "held_out.jsonl").read_text().splitlines()}
    assert len(held_out) == 64
    assert not train & held_out


def test_the_tiny_model_loads_in_transformers_with_its_tokenizer(tmp_path: Path) -> None:
    size = write_tiny_llama(tmp_path, characters=string.ascii_lowercase + "=")
    model, tokenizer = load_policy(tmp_path)
    assert 115_000 < size < 135_000
    assert sum(p.numel() for p in model.parameters()) == size
    ids = tokenizer.encode("abcd=")
    assert tokenizer.decode(ids) == "abcd="
    assert len(ids) == 5
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits
    # An untrained model is near the uniform distribution over its 31 tokens.
    assert abs(float(torch.logsumexp(logits[0, -1], 0) - logits[0, -1].mean()) - 3.434) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_learns_on_separate_processes_and_leaves_a_balanced_record(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    command = [sys.executable, "-m", "arriero", "demo", "--run-dir", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert 0.4 < summary["accuracy_before"] < 0.65
    assert summary["accuracy_after"] > 0.85
    assert summary["staleness_bound"] == 1
    assert summary["staleness_max"] <= 1
    dropped = sum(summary["groups_dropped"].values())
    assert summary["groups_admitted"] == summary["groups_trained"] + dropped
    assert summary["steps"] == 60
    assert (run / "curves.png").stat().st_size > 10_000
    assert (run / "model" / "model.safetensors").is_file()
    assert not list(Path("/dev/shm").glob("arriero-aipo-*"))
