"""`manifest.json`: what a run was made of. Passwords in options and addresses are masked."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, Field, JsonValue, NonNegativeInt, PositiveInt

from arriero.schemas.messages import Message


class CodeRevision(Message):
    """A git repository that code came from. `diff_sha256` is of `git diff HEAD`, empty where nothing changed.

    `dirty` is also true for untracked files, which the hash doesn't cover.
    """

    root: str
    commit: str
    dirty: bool
    diff_sha256: str = ""


class Hardware(Message):
    """The machine that the run was started on. `gpus` are names and memory as the driver reports them."""

    cpus: PositiveInt
    memory_mb: NonNegativeInt
    gpus: tuple[str, ...] = ()


class PipelineSource(Message):
    """The pipeline function `module:name` and the file it stands in."""

    function: str
    file: str
    sha256: str


class Ancestor(Message):
    """A run that this one starts from or learns from: `option` is the dotted key that names what it left.

    `sha256` is of its model's safetensors, file by file; if it is its record, the head of the chain. `step`:
    the version whose weights they are; None: those that it ended with.
    """

    option: str
    run_id: str
    run_dir: str
    pipeline: str
    sha256: str
    took: Literal["model", "record"] = "model"
    step: NonNegativeInt | None = None


class InputFile(Message):
    """A local file that the configuration names, by `key`; `sha256` is empty for one of more than 256 MiB."""

    key: str
    path: str
    bytes: NonNegativeInt
    changed_s: float
    sha256: str = ""


class ContentHashes(Message):
    """What prompts are read by and scored by, each by the dotted place of its component in the graph.

    `tokenizers`: SHA-256 of the tokenizer's files in the model directory; `chats`: the `chat_digest` and
    `rewards`: the `reward_version` that the run's records carry.
    """

    tokenizers: dict[str, str] = Field(default_factory=dict)
    chats: dict[str, str] = Field(default_factory=dict)
    rewards: dict[str, str] = Field(default_factory=dict)


class RunManifest(Message):
    """`sources`: for each dotted key of `config` "default", the configuration file, or "command line".

    `package_sha256` is of arriero's own code as it is imported, `shipped_sha256` of the index of the archives
    that a cluster ran. `hubs`: message brokers that replicated each other. Each row of the data is told by
    its place and bound by its `prompt_sha256` in the lineage.
    """

    format: Literal[1] = 1
    run_id: str
    pipeline: PipelineSource
    graph_digest: str
    config: dict[str, JsonValue]
    sources: dict[str, str]
    seed: NonNegativeInt
    code: tuple[CodeRevision, ...] = ()
    package_sha256: str = ""
    shipped_sha256: str = ""
    inputs: tuple[InputFile, ...] = ()
    content: ContentHashes = Field(default_factory=ContentHashes)
    python: str
    platform: str
    packages: dict[str, str] = Field(default_factory=dict)
    hardware: Hardware
    host: str
    pid: PositiveInt
    started: AwareDatetime
    argv: tuple[str, ...]
    hubs: PositiveInt = 1
    ancestors: tuple[Ancestor, ...] = ()
