"""What a run is made of, collected for its manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, cast

from pydantic import JsonValue, TypeAdapter

import arriero
from arriero.engine.lineage.chain import head_of
from arriero.launchers.catalog import Pipeline
from arriero.launchers.inputs import input_files, package_sha256
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import (
    Ancestor,
    CodeRevision,
    ContentHashes,
    Hardware,
    PipelineSource,
    RunManifest,
)

MASK = "***"
BRANCHES = "branches"  # of a run directory: the models of versions that other runs have started from
SECRET_NAME = re.compile(
    r"passw(or)?d|secret|credential|api[-_]?key|(access|private)[-_]?key"
    r"|(auth|access|bearer|api|hf|hub)[-_]?token",
    re.I,
)
SECRET_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def manifest(
    *,
    run_id: str,
    pipeline: Pipeline,
    spec: GraphSpec,
    config: object,
    sources: Mapping[str, str],
    seed: int,
    started: datetime,
    argv: Sequence[str],
    content: ContentHashes,
    hubs: int,
) -> RunManifest:
    """Everything known about the run that is about to start on this machine. It asks git and nvidia-smi."""
    function = pipeline.function
    adapter: TypeAdapter[object] = TypeAdapter(pipeline.config_type)
    dumped = adapter.dump_python(config, mode="json", fallback=as_text)
    return RunManifest(
        run_id=run_id,
        pipeline=PipelineSource(
            function=f"{function.__module__}:{pipeline.name}",
            file=str(pipeline.file),
            sha256=hashlib.sha256(pipeline.file.read_bytes()).hexdigest(),
        ),
        graph_digest=spec.digest,
        config=cast("dict[str, JsonValue]", masked(dumped)),
        sources=dict(sources),
        seed=seed,
        code=revisions([Path(arriero.__file__).parent, pipeline.file.parent]),
        package_sha256=package_sha256(),
        inputs=input_files(spec),
        content=content,
        python=platform.python_version(),
        platform=platform.platform(),
        packages=packages(),
        hardware=hardware(),
        host=platform.node(),
        pid=os.getpid(),
        started=started,
        argv=masked_words(argv),
        hubs=hubs,
        ancestors=tuple(ancestors(dumped)),
    )


def as_text(value: object) -> str:
    """What has no JSON form: a function or class by its import path, anything else as its repr."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    return f"{module}:{name}" if name else repr(value)


def is_secret(name: str) -> bool:
    """Whether an option of this name holds something that nobody else may read."""
    return SECRET_NAME.search(name) is not None


def masked(value: JsonValue, name: str = "") -> JsonValue:
    """The value with secrets replaced, which are told by the names of their keys or stand in an address."""
    if isinstance(value, dict):
        return {k: masked(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v, name) for v in value]
    if value not in (None, "") and is_secret(name):
        return MASK
    return SECRET_IN_ADDRESS.sub(MASK, value) if isinstance(value, str) else value


def masked_words(argv: Sequence[str]) -> tuple[str, ...]:
    """A command line with the values of secret options replaced."""
    found: list[str] = []
    secret = False
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            secret = is_secret(name)
            found.append(f"{name}={MASK}" if secret and equals else name + equals + _mask_json(value))
        else:
            found.append(MASK if secret else _mask_json(word))
    return tuple(found)


def _mask_json(word: str) -> str:
    # A section given as JSON may hold a secret; what JSON it was stands in the manifest's config.
    return (
        MASK
        if word.startswith(("{", "[")) and SECRET_NAME.search(word)
        else SECRET_IN_ADDRESS.sub(MASK, word)
    )


def ancestors(config: JsonValue, option: str = "") -> Iterator[Ancestor]:
    """The runs that a configuration names: their directories, or the directory `model` inside of one."""
    match config:
        case dict():
            for key, value in config.items():
                yield from ancestors(value, f"{option}.{key}" if option else key)
        case list():
            for number, value in enumerate(config):
                yield from ancestors(value, f"{option}.{number}")
        case str() if config and "\n" not in config and "://" not in config:
            directory = Path(config).resolve()
            run, step = _maker_of(directory)
            if directory.name == "model" and (run / "manifest.json").is_file():
                yield _ancestor(option, run, "model", _model_sha256(directory), step)
            elif (directory / "manifest.json").is_file() and (directory / "lineage").is_dir():
                yield _ancestor(option, directory, "record", head_of(str(directory / "lineage")))
        case _:
            pass


def _maker_of(model: Path) -> tuple[Path, int | None]:
    """The run directory that a model directory lies in, and the step it is of: RUN/branches/STEP/model."""
    outer = model.parent.parent
    if outer.name == BRANCHES and model.parent.name.isdigit():
        return outer.parent, int(model.parent.name)
    return model.parent, None


def _ancestor(
    option: str, run: Path, took: Literal["model", "record"], sha256: str, step: int | None = None
) -> Ancestor:
    made = RunManifest.model_validate_json((run / "manifest.json").read_bytes())
    return Ancestor(
        option=option, run_id=made.run_id, run_dir=str(run), pipeline=made.pipeline.function, sha256=sha256,
        took=took, step=step,
    )  # fmt: skip


def _model_sha256(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def revisions(folders: Iterable[Path]) -> tuple[CodeRevision, ...]:
    """The git repositories around these folders, each once; none where there is no git."""
    roots = dict.fromkeys(_git(folder, "rev-parse", "--show-toplevel").strip() for folder in folders)
    found: list[CodeRevision] = []
    for root in (r for r in roots if r):
        commit = _git(Path(root), "rev-parse", "HEAD").strip()
        if not commit:
            continue
        diff = _git(Path(root), "diff", "HEAD", "--no-ext-diff")
        dirty = bool(_git(Path(root), "status", "--porcelain").strip())
        digest = hashlib.sha256(diff.encode()).hexdigest() if diff else ""
        found.append(CodeRevision(root=root, commit=commit, dirty=dirty, diff_sha256=digest))
    return tuple(found)


def write_diffs(run_dir: Path, manifest: RunManifest) -> None:
    """What each repository had changed, as `code-<name>.diff`, for the owner alone to read."""
    for revision in manifest.code:
        root = Path(revision.root)
        if diff := _git(root, "diff", "HEAD", "--no-ext-diff"):
            path = run_dir / f"code-{root.name}.diff"
            path.touch(mode=0o600)
            path.write_text(diff)


def _git(folder: Path, *words: str) -> str:
    return _output(["git", "-C", str(folder), *words])


def _output(command: list[str]) -> str:
    """What the command prints; "" if it isn't there, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


def packages() -> dict[str, str]:
    """Versions of arriero and of the packages it requires, as far as they are installed."""
    try:
        required = importlib.metadata.requires("arriero") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    names = [re.split(r"[^A-Za-z0-9._-]", r, maxsplit=1)[0] for r in required if "extra ==" not in r]
    found = {"arriero": arriero.__version__}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> Hardware:
    """CPUs this process may use, memory of the machine, and the GPUs that nvidia-smi lists."""
    import psutil

    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    return Hardware(
        cpus=len(os.sched_getaffinity(0)),
        memory_mb=psutil.virtual_memory().total >> 20,
        gpus=tuple(line.strip() for line in _output(query).splitlines() if line.strip()),
    )


def own_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES leaves to this process; where it isn't set, all that nvidia-smi lists."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip())
    listed = _output(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    return tuple(line.strip() for line in listed.splitlines() if line.strip())
