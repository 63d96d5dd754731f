"""Measures that leave the run while it goes on, read back by the programs that they are for."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import threading
import urllib.request
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from arriero.engine.errors import UserError
from arriero.launchers import conduct, sinks
from arriero.launchers.cli import main
from arriero.launchers.prometheus import FILE
from arriero.launchers.rundir import RunDir
from tests.inline_runs import policy_gradient_fields, recorded_grpo

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run that told all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield recorded_grpo(tmp_path_factory.mktemp("sinks"), "--sinks", "tensorboard,wandb,mlflow")


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.slow
def test_mlflow_has_the_run_with_every_step_and_its_end(run: RunDir) -> None:
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "train/reward")
    assert [(m.step, m.value) for m in history] == [(line["step"], line["reward"]) for line in lines(run)]
    assert found.data.params["samples"] == "4"
    assert found.data.tags["arriero.head"] == run.read_summary().lineage.head  # type: ignore[union-attr]
    assert {a.path for a in client.list_artifacts(found.info.run_id)} == {"manifest.json", "summary.json"}


@pytest.mark.slow
def test_weights_and_biases_has_an_offline_run_of_that_name(run: RunDir) -> None:
    (folder,) = (run.path / "wandb").glob("wandb/offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert run.read_manifest().run_id in file.name
    assert file.stat().st_size > 1000


@pytest.mark.slow
def test_tensorboard_is_written_as_before_and_left_out_on_demand(run: RunDir, tmp_path: Path) -> None:
    assert len([*run.tensorboard.iterdir()]) == 1
    other = recorded_grpo(tmp_path, "--sinks", "mlflow", "--steps", "1")
    assert [*other.tensorboard.iterdir()] == []


def test_a_sink_that_fails_is_told_of_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
    with caplog.at_level(logging.WARNING, logger="arriero"):
        run = recorded_grpo(tmp_path, "--sinks", "tensorboard,mlflow")
    assert run.read_summary().state == "finished"
    told = [r.message for r in caplog.records if "sink mlflow has failed and is left out" in r.message]
    assert len(told) == 1
    assert f"arriero export {run.path} --to mlflow" in told[0]


def test_what_a_sink_needs_is_looked_for_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> None:
        return None

    monkeypatch.setattr(sinks, "find_spec", nothing)
    sinks.can_write(["tensorboard"], prometheus=False)
    with pytest.raises(UserError, match=r"--sinks wandb needs wandb: pip install 'arriero\[export\]'"):
        sinks.can_write(("tensorboard", "wandb"), prometheus=False)
    with pytest.raises(UserError, match=r"arriero\[metrics\]"):
        sinks.can_write((), prometheus=True)


def test_the_hub_of_a_cluster_says_what_its_image_lacks(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in conduct.BUNDLE:
        shutil.copyfile(run.path / name, tmp_path / name)
    monkeypatch.setattr(sinks, "find_spec", {"": ""}.get)
    assert conduct.main(["--run-dir", str(tmp_path)]) == 2
    assert "--sinks wandb needs wandb" in capsys.readouterr().err


def scraped(run: RunDir, found: list[str], over: threading.Event) -> None:
    """What a scrape gives, again and again, from the place that the run's file names."""
    while not over.wait(0.05):
        try:
            (target,) = json.loads((run.path / FILE).read_text())
            with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=5) as answer:
                found.append(answer.read().decode())
        except (OSError, ValueError):
            continue


def test_prometheus_sees_the_run_while_it_goes_on(tmp_path: Path) -> None:
    parser: Any = import_module("prometheus_client.parser")
    run, texts, over = RunDir(tmp_path / "run"), list[str](), threading.Event()
    thread = threading.Thread(target=scraped, args=(run, texts, over))
    thread.start()
    try:
        recorded_grpo(tmp_path, "--metrics-port", "0", "--steps", "12")
    finally:
        over.set()
        thread.join()
    assert not (run.path / FILE).exists()
    seen = [
        {f.name: f for f in parser.text_string_to_metric_families(text)}
        for text in texts
        if "arriero_step " in text
    ]
    assert seen, "no scrape came while the run went on"
    steps = [found["arriero_step"].samples[0].value for found in seen]
    assert steps == sorted(steps)
    last = seen[-1]
    names = {s.labels["node"] for s in last["arriero_node_busy_seconds"].samples}
    assert names == {"prompts", "generator", "reward", "advantage", "trainer"}
    assert {s.labels["edge"] for s in last["arriero_edge_messages"].samples} >= {"prompts", "generator"}
    assert last["arriero_prompts_admitted"].samples[0].value >= 4
    assert all(re.fullmatch("arriero_[a-z_]+", name) for name in last)
    if steps[-1]:
        assert "train/loss" in {s.labels["tag"] for s in last["arriero_measure"].samples}


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy_gradient_fields(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["run", "grpo", "--model", str(tmp_path / "tiny"), "--data", str(tmp_path / "sums.jsonl")]
        command += ["--reward", "function", "--reward.function", "tests.inline_runs:share_of_threes"]
        command += ["--steps", "1", "--groups-per-step", "4", "--samples", "4", "--inline", "--quiet"]
        command += ["--run-dir", str(tmp_path / "run"), "--metrics-port", str(port)]
        assert main(command) == 2
    assert f"--metrics-port {port} of 127.0.0.1: Address already in use" in capsys.readouterr().err


def test_sinks_that_hang_share_one_bound_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    class Hung:
        """Stands for an export whose store doesn't answer."""

        def __init__(self, *_: object) -> None:
            never.wait(60)

    for module in ("weights_and_biases", "ml_flow"):
        monkeypatch.setattr(import_module(f"arriero.launchers.exports.{module}"), "Live", Hung)
    monkeypatch.setattr(sinks, "_FINISH_S", 0.1)
    monkeypatch.setattr(sinks, "subject", str)
    made = sinks.Sinks(["mlflow", "wandb"], RunDir(tmp_path))
    try:
        made.step(1, 0.0, [])
        made.close()
    finally:
        never.set()
    told = [r.message for r in caplog.records if "didn't finish within 0.1 s" in r.message]
    assert [m.split()[2] for m in told] == ["mlflow", "wandb"]
