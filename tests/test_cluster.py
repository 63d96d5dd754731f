"""What a graph becomes on a cluster: needs, the code that goes along, Slurm's script and Volcano's job."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from torchx.specs import AppDef

from arriero.engine.errors import GraphError, UserError
from arriero.launchers import jobs
from arriero.launchers.cluster import cluster_app, guest_plan, scheduler_name
from arriero.launchers.profile import (
    Profile,
    RoleNeeds,
    SlurmNeeds,
    read_profile,
)  # fmt: skip
from arriero.launchers.ship import code, user_archive
from arriero.launchers.slurm_script import guest_script, script
from tests.cluster.placing import place, placed
from tests.toys import toy_graph


def test_the_hub_is_first_and_only_roles_that_compute_get_the_gpus_of_the_profile() -> None:
    made = placed(Profile(gpus=1), generators=3)
    assert [p.role for p in made.places] == ["hub", "prompts", "generator", "reward", "collect", "trainer"]
    assert {p.role: p.gpus for p in made.places if p.gpus} == {"trainer": 1}
    assert place(made, "generator")["tasks"] == 3


def test_ranks_that_do_not_fit_on_a_node_are_spread_over_equal_parts() -> None:
    # 12 ranks of one GPU, 8 GPUs a node: two nodes of six.
    trainer = place(placed(Profile(gpus=1, gpus_per_node=8), ranks=12, groups=12), "trainer")
    assert (trainer["tasks"], trainer["hosts"], trainer["ranks"], trainer["gpus"]) == (2, 2, 6, 6)
    # 10 ranks, 4 GPUs a node: three nodes would need a third of a rank; five take two each.
    assert place(placed(Profile(gpus=1, gpus_per_node=4), ranks=10, groups=10), "trainer")["hosts"] == 5


def test_what_a_role_needs_may_be_said_for_one_rank() -> None:
    needs = RoleNeeds(cpus=4, memory_mb=1000, gpus=0, env={"A": "b"})
    trainer = place(placed(Profile(gpus=1, roles={"trainer": needs}), ranks=2), "trainer")
    assert (trainer["cpus"], trainer["memory_mb"], trainer["gpus"]) == (8, 2000, 0)
    assert (trainer["env"]["A"], trainer["env"]["OMP_NUM_THREADS"]) == ("b", "4")


def test_a_role_may_need_what_a_named_resource_of_torchx_holds() -> None:
    trainer = place(placed(Profile(roles={"trainer": RoleNeeds(resource="gpu.medium")})), "trainer")
    assert (trainer["cpus"], trainer["memory_mb"], trainer["gpus"]) == (16, 65536, 2)  # TorchX 2026.10.26
    with pytest.raises(UserError, match=r"roles\.trainer\.resource = 'gpu\.vast': TorchX knows no such"):
        placed(Profile(roles={"trainer": RoleNeeds(resource="gpu.vast")}))


def test_memory_is_said_in_one_way_in_all_components() -> None:
    needs = RoleNeeds(memory_mb=1000, apart=True)
    made = script(placed(Profile(roles={"trainer": needs, "reward": RoleNeeds(memory_mb=2000)})))
    first, second = sbatch_options(made)
    # The hub's 4096 and 2000 MB for the six CPUs of hub, prompts, generator, reward and collect.
    assert "--mem-per-cpu=1016M" in first
    assert "--mem-per-cpu=1000M" in second


def test_needs_of_a_role_that_is_not_there_are_refused() -> None:
    with pytest.raises(UserError, match="needs for trainr, which is no role of toy: prompts, generator"):
        placed(Profile(roles={"trainr": RoleNeeds()}))


def test_a_role_has_letters_and_digits_for_schedulers_and_no_two_have_the_same() -> None:
    assert scheduler_name("Weight-Sync_2") == "weightsync2"
    spec = toy_graph().check()
    twice = spec.model_copy(
        update={"nodes": (spec.nodes[0].model_copy(update={"role": "re-ward"}), *spec.nodes[1:])}
    )
    with pytest.raises(GraphError, match="both called reward"):
        placed(Profile(), twice)


@pytest.mark.parametrize("role", ["2nd", "評価", "", "a" * 41, "a" * 40 + "b"])
def test_a_role_that_schedulers_would_refuse_has_a_hash_in_its_name(role: str) -> None:
    name = scheduler_name(role)
    assert re.fullmatch("[a-z][a-z0-9]{,39}", name)
    assert name.endswith(hashlib.sha256(role.encode()).hexdigest()[:8])


def test_a_long_name_of_a_run_is_no_fault_of_its_roles() -> None:
    app = cluster_app(placed(Profile(), run_id=f"distilled-from-{'several-' * 20}teachers"))
    assert [r.name for r in app.roles][:3] == ["hub", "prompts", "generator"]
    assert len(app.name) == 20


def test_shared_memory_is_refused_between_hosts() -> None:
    spec = toy_graph().check()
    weights = {"transport": "shm", "lease_timeout_s": None}
    trainer = spec.nodes[-1].model_copy(update={"config": {"weights": weights}})
    spec = spec.model_copy(update={"nodes": (*spec.nodes[:-1], trainer)})
    with pytest.raises(UserError, match="reaches one host only; take nixl, gloo, nccl or store"):
        placed(Profile(), spec)
    placed(Profile(slurm=SlurmNeeds(mode="packed")), spec)


def test_the_app_is_one_that_any_scheduler_of_torchx_takes() -> None:
    app: AppDef = cluster_app(placed(Profile(gpus=1), generators=3))
    assert [(r.name, r.num_replicas, r.resource.gpu) for r in app.roles][:3] == [
        ("hub", 1, 0), ("prompts", 1, 0), ("generator", 3, 0),
    ]  # fmt: skip
    assert app.roles[0].args[:3] == ["/shared/toy-1/ship/start.py", "c0de", "arriero.launchers.conduct"]
    assert app.roles[2].args[-2:] == ["--replica", "${replica_id}"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[profile.slurm]\npartion = "x"',
            "profile.slurm.partion: unknown key; did you mean slurm.partition?",
        ),
        ("[profile.slurm]\ngpus = -1", "profile.slurm.gpus = -1 should be greater than or equal to 0"),
        ("[profil.slurm]\n", "unknown table profil; a profile is a table"),
        ('[profile.slurm]\non = "kubernetes"', "profile.slurm.on = 'kubernetes', but --on slurm"),
        ("[profile.slurm\n", "is not TOML"),
    ],
)
def test_a_mistake_in_a_profile_is_named_with_its_key(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "arriero.toml"
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        read_profile("slurm", "", file)
    assert told in str(raised.value)


def test_a_profile_has_the_name_of_its_scheduler_or_its_own(tmp_path: Path) -> None:
    file = tmp_path / "arriero.toml"
    file.write_text('[profile.slurm]\ngpus = 2\n[profile.big]\non = "kubernetes"\nimage = "i"\n')
    assert read_profile("slurm", "", file).gpus == 2
    assert read_profile(None, "big", file).on == "kubernetes"
    assert read_profile("slurm", "", tmp_path / "none.toml") == Profile(on="slurm")
    with pytest.raises(UserError, match=r"no \[profile.small\]; there are: slurm, big"):
        read_profile("slurm", "small", file)


def test_the_code_of_a_run_is_the_same_bytes_each_time_and_runs_only_as_it_was_packed(tmp_path: Path) -> None:
    packed = code([])
    assert packed.digest == code([]).digest
    folder = tmp_path / "ship"
    packed.write(folder)
    start = [sys.executable, str(folder / "start.py")]
    environment = {"TMPDIR": str(tmp_path), "PATH": ""}

    def run(digest: str) -> subprocess.CompletedProcess[str]:
        words = [*start, digest, "arriero", "--version"]
        return subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )  # fmt: skip

    assert run(packed.digest).stdout.startswith("arriero ")
    refused = run("0" * 64)
    assert (refused.returncode, "is not what the run was launched with" in refused.stderr) == (2, True)


def test_a_changed_archive_is_refused(tmp_path: Path) -> None:
    packed = code([])
    folder = tmp_path / "ship"
    packed.write(folder)
    (folder / "user.zip").write_bytes(b"something else")
    words = [sys.executable, str(folder / "start.py"), packed.digest, "arriero", "--version"]
    done = subprocess.run(
        words, env={"TMPDIR": str(tmp_path), "PATH": ""}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert "user.zip is not what the run was launched with" in done.stderr


def test_the_wheel_names_every_file_with_its_hash(tmp_path: Path) -> None:
    packed = code([])
    (wheel,) = (name for name in packed.files if name.endswith(".whl"))
    (tmp_path / wheel).write_bytes(packed.files[wheel])
    with zipfile.ZipFile(tmp_path / wheel) as archive:
        record = archive.read(next(n for n in archive.namelist() if n.endswith("/RECORD"))).decode()
        assert {line.split(",")[0] for line in record.splitlines()} == {*archive.namelist()}
        assert "arriero/py.typed" in archive.namelist()
    index = json.loads(packed.files["code.json"])
    assert index[wheel] == hashlib.sha256(packed.files[wheel]).hexdigest()


def test_the_users_modules_go_along_with_the_rest_of_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_own").mkdir()
    for name in (
        "mine_own/__init__.py",
        "mine_own/used.py",
        "mine_own/other.py",
        "mine_alone.py",
        "unused.py",
    ):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("mine_own.used", "mine_alone"):
        importlib.import_module(name)
    (tmp_path / "user.zip").write_bytes(user_archive([tmp_path]))
    with zipfile.ZipFile(tmp_path / "user.zip") as archive:
        assert sorted(archive.namelist()) == [
            "mine_alone.py", "mine_own/__init__.py", "mine_own/other.py", "mine_own/used.py",
        ]  # fmt: skip


def sbatch_options(text: str) -> list[list[str]]:
    """Of each component."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            found.append([])
        elif line.startswith("#SBATCH"):
            found[-1] += shlex.split(line)[1:]
    return found


def test_roles_with_gpus_are_components_of_their_own_and_the_rest_share_the_hubs() -> None:
    needs = SlurmNeeds(partition="gpu", gpu_type="h100", time="60")
    first, second = sbatch_options(script(placed(Profile(gpus=1, slurm=needs), ranks=2)))
    assert {"--partition=gpu", "--time=60", "--signal=TERM@120", "--requeue"} <= {*first}
    # Two CPUs of the hub and one each of prompts, generator, reward, collect.
    assert {"--nodes=1", "--cpus-per-task=6"} <= {*first}
    assert {"--ntasks=1", "--cpus-per-task=2", "--gpus-per-task=h100:2", "--partition=gpu"} <= {*second}


def test_a_packed_job_is_one_allocation_for_all() -> None:
    text = script(placed(Profile(gpus=1, slurm=SlurmNeeds(mode="packed", nodes=2)), generators=4, ranks=2))
    (options,) = sbatch_options(text)
    # 2 + 1 + 4 + 1 + 1 + 2 CPUs and 2 GPUs on two nodes; a CPU more, lest a task of two find one on each.
    assert {"--nodes=2", "--cpus-per-task=7", "--gpus-per-node=1"} <= {*options}
    assert "--het-group" not in text


def test_on_several_nodes_the_largest_tasks_begin_first_and_a_role_may_use_any_of_the_nodes() -> None:
    profile = Profile(gpus=1, gpus_per_node=2, slurm=SlurmNeeds(mode="packed", nodes=3))
    steps = [
        shlex.split(line.rstrip("\\"))
        for line in script(placed(profile, generators=2, ranks=4)).splitlines()
        if line.startswith("srun")
    ]
    assert [next(w for w in words if w.startswith("--job-name")) for words in steps] == [
        f"--job-name={role}" for role in ("trainer", "hub", "prompts", "generator", "reward", "collect")
    ]
    assert {"--nodes=2", "--ntasks-per-node=1"} <= {*steps[0]}  # ranks on two hosts
    assert "--nodes=1-1" in steps[1]
    assert "--nodes=1-2" in steps[3]


def test_three_hubs_are_a_step_of_the_first_and_one_of_the_others_on_different_nodes() -> None:
    text = script(placed(Profile(slurm=SlurmNeeds(mode="packed", nodes=3)), hubs=3))
    steps = [shlex.split(line.rstrip("\\")) for line in text.splitlines() if line.startswith("srun")]
    (others,) = (words for words in steps if "--job-name=hubs" in words)
    assert {"--ntasks=2", "--nodes=2", "--ntasks-per-node=1", "ARRIERO_FIRST=1"} <= {*others}
    program = next(line for line in text.splitlines() if "hub_peer" in line)
    assert program.endswith("arriero.launchers.hub_peer --run-dir /shared/toy-1 --arrive-s 900 "
                            "--replica SLURM_PROCID --hubs 3 &")  # fmt: skip
    lines = text.splitlines()
    assert "arriero.launchers.conduct" in lines[lines.index("hub=$!") - 1], (
        "the first decides when it is over"
    )
    (options,) = sbatch_options(text)
    # 3 x 2 CPUs of hubs and 5 of roles on three nodes; one more, lest a task of two find one on each.
    assert {"--nodes=3", "--cpus-per-task=5"} <= {*options}


def test_no_role_is_called_like_the_hubs_when_there_are_several() -> None:
    spec = toy_graph().check()
    named = spec.model_copy(
        update={"nodes": (spec.nodes[0].model_copy(update={"role": "hubs"}), *spec.nodes[1:])}
    )
    placed(Profile(), named)
    with pytest.raises(GraphError, match="the other hubs and hubs are both called hubs"):
        placed(Profile(), named, hubs=3)


def test_a_script_is_one_that_bash_reads(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(script(placed(Profile(gpus=1, env={"QUOTED": "it's $HOME"}), ranks=2)))
    subprocess.run(["bash", "-n", str(file)], check=True)
    assert "export QUOTED='it'\"'\"'s $HOME'" in file.read_text()


def test_a_job_of_one_more_replica_has_the_needs_of_its_role_and_becomes_its_agent(tmp_path: Path) -> None:
    needs = SlurmNeeds(partition="gpus", account="llamas", gpu_type="h200", time="30")
    made = placed(Profile(roles={"generator": RoleNeeds(gpus=2, cpus=3)}, slurm=needs), generators=4)
    text = guest_script(guest_plan(made, "generator"))
    assert {
        "#SBATCH --partition=gpus", "#SBATCH --account=llamas", "#SBATCH --no-requeue",
        "#SBATCH --ntasks=1 --cpus-per-task=3 --gpus-per-task=h200:2",
    } <= {*text.splitlines()}  # fmt: skip
    last = text.splitlines()[-1]
    assert last.startswith("exec ")
    assert "arriero.launchers.agent --run-dir /shared/toy-1" in last
    assert "--role generator --join --log /shared/toy-1/logs/joined-generator-" in last
    (tmp_path / "guest.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "guest.sh"], check=False).returncode == 0


def test_a_secret_is_a_file_on_slurm_and_never_a_value() -> None:
    made = placed(Profile(secrets={"HF_TOKEN": "~/.hf/token"}))
    assert "--secret 'HF_TOKEN=~/.hf/token'" in script(made)


def test_what_is_rendered_for_a_thousand_replicas_is_no_longer_than_for_one() -> None:
    one, many = (script(placed(Profile(gpus=1), generators=n)) for n in (1, 1024))
    assert len(many) - len(one) < 20


def test_a_handle_of_another_scheduler_is_refused() -> None:
    with pytest.raises(UserError, match="a handle is slurm://JOB or kubernetes://NAMESPACE:NAME"):
        jobs.find("pbs://12")
    assert jobs.find("slurm://12").app_id == "12"
