"""What a manifest says of tokenizer, chat template and reward, beside what the records carry."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from arriero.components.environments import Question
from arriero.components.prompts import PromptSource
from arriero.components.rewards import Gsm8k, reward_version
from arriero.launchers.cli import main
from arriero.launchers.content_hashes import content_hashes, tokenizer_sha256
from arriero.launchers.rundir import RunDir
from arriero.pipelines.archer import ArcherConfig, archer
from tests.inline_runs import tiny_model

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_the_manifest_names_tokenizer_template_and_reward_as_the_records_do(tmp_path: Path) -> None:
    model, data, run = tiny_model(tmp_path / "model"), tmp_path / "d.jsonl", RunDir(tmp_path / "run")
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) + "\n" for i in range(4)))
    words = [
        "run",
        "grpo",
        "--model",
        model,
        "--data",
        str(data),
        "--reward",
        "gsm8k",
        "--chat.template",
        CHAT,
    ]
    small = ["--steps", "1", "--groups-per-step", "2", "--samples", "2", "--slots", "4"]
    limits = ["--sampling.max-new-tokens", "3", "--inline", "--quiet", "--run-dir", str(run.path)]
    assert main([*words, *small, *limits]) == 0
    told = run.read_manifest().content
    record = "".join(p.read_text() for p in (run.lineage / "chain").glob("*.jsonl"))
    assert f'"chat_digest":"{told.chats["generator"]}"' in record.replace(" ", "")
    assert f'"reward_version":"{told.rewards["reward"]}"' in record.replace(" ", "")
    assert told.tokenizers["generator"] == told.tokenizers["trainer"] == tokenizer_sha256(Path(model))


def test_the_hash_of_a_tokenizer_is_that_of_its_files_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    inner = hashlib.sha256(b"{}").digest()
    assert tokenizer_sha256(tmp_path) == hashlib.sha256(b"tokenizer.json\n" + inner).hexdigest()
    before = tokenizer_sha256(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_sha256(tmp_path) == before
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_sha256(tmp_path) != before
    assert tokenizer_sha256(tmp_path / "nowhere") == ""


def test_an_environment_is_told_as_the_reward_that_it_is(tmp_path: Path) -> None:
    model, task = tiny_model(tmp_path / "model"), Question(reward=Gsm8k(), attempts=2)
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    graph = archer(ArcherConfig(model=model, data=PromptSource(path=str(data)), environment=task))
    told = content_hashes(graph.check())
    assert [*told.rewards.values()] == [reward_version(task)]
    assert not told.chats
