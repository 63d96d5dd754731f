"""`arriero run --from RUN@STEP`: a new run from the weights of a version of another, and its command line.

    checkpoint or model of RUN, and recorded batches -> RUN/branches/<step>/model -> --model of the new run

What else was said when RUN was started holds too, unless it is said otherwise. The moments of the optimizer
begin anew, and versions count from 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from arriero.engine.errors import UserError
from arriero.launchers.content_hashes import TOKENIZER_FILES
from arriero.launchers.provenance import BRANCHES, MASK
from arriero.launchers.rundir import RunDir
from arriero.launchers.stamping import model_sha256

FROM = "--from"
_SUMS = "model.json"  # beside the model: the SHA-256 of its files
# Of the command that started the other run, not of what it was.
_OWN = {FROM, "--run-dir", "--overwrite", "--resume", "--allow-change", "--record-url", "--model"}


def branches(args: Sequence[str]) -> bool:
    """Whether this command line begins from another run."""
    return any(word.partition("=")[0] == FROM for word in args)


def words_of(args: Sequence[str]) -> list[str]:
    """The whole command line of the new run. Makes the model that it starts from; raises UserError."""
    target, given = _taken(args)
    place, at, step = target.rpartition("@")
    if not at or not step.isdigit():
        raise UserError(f"{FROM} {target}: write RUN@STEP, such as runs/demo@12")
    run = RunDir(Path(place).absolute())
    argv = run.read_manifest().argv
    if argv[1:2] != ("run",) or len(argv) < 3:
        raise UserError(f"{place} wasn't started by arriero run; begin with its model instead: --model")
    pipeline, *before = argv[2:]
    if given and not given[0].startswith("-"):
        pipeline = given.pop(0)
    before = _without(before, given)
    if hidden := next((w for w in before if MASK in w), ""):
        raise UserError(f"{hidden} holds a secret, which no run keeps; give its option again")
    return [pipeline, *before, *given, "--model", str(model_of(run, int(step)))]


def model_of(run: RunDir, version: int) -> Path:
    """A model directory with the weights of `version`, made once. Raises UserError if they can't be had."""
    from arriero.launchers.replay import RecordedTrainer

    directory = run.path / BRANCHES / f"{version:09}" / "model"
    if (directory / "config.json").exists():
        if model_sha256(directory) != _kept(directory):
            raise UserError(f"{directory} isn't as it was made; remove it, and it is made anew")
        return directory
    trainer = RecordedTrainer(str(run.path))
    if version:
        trainer.step(version)
    state = trainer.load(version)
    with trainer.publisher(state) as publish:
        while state.version < version:
            state.step(trainer.batch(state.version + 1))
        made, then = publish(version, {}).manifest, trainer.weights_of(version)
    if made is not None and then and not trainer.loose and made.fingerprint != then:
        raise UserError(
            f"version {version} of {run.path} comes out with weights {made.fingerprint[:12]}, recorded are "
            f"{then[:12]}; see arriero replay {run.path} --until-divergence"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix="part-") as folder:
        state.save(part := Path(folder) / "model")
        _with_tokenizer(part, Path(trainer.trainer.model))
        sums = json.dumps(model_sha256(part), indent=1)
        try:
            part.replace(directory)
        except OSError:  # somebody else has made the same at the same time
            if not directory.is_dir():
                raise
        else:
            directory.with_name(_SUMS).write_text(sums)
    return directory


def _with_tokenizer(model: Path, before: Path) -> None:
    """The tokenizer's files as they were before: written again they have other bytes, and so another hash."""
    for name in TOKENIZER_FILES:
        (model / name).unlink(missing_ok=True)
        if (before / name).is_file():
            copyfile(before / name, model / name)


def _kept(model: Path) -> dict[str, str]:
    """Those of when the model was made; none if that isn't known."""
    try:
        found: dict[str, str] = json.loads(model.with_name(_SUMS).read_text())
    except (OSError, ValueError):
        return {}
    return found


def _taken(args: Sequence[str]) -> tuple[str, list[str]]:
    """What stands behind --from, and the other words."""
    rest = list(args)
    at = next(k for k, word in enumerate(rest) if word.partition("=")[0] == FROM)
    word = rest.pop(at)
    if "=" in word:
        return word.partition("=")[2], rest
    if at == len(rest):
        raise UserError(f"{FROM} needs a value: RUN@STEP")
    return rest.pop(at), rest


def _without(words: Sequence[str], given: Sequence[str]) -> list[str]:
    """Without what belongs to the other run alone, and what is said anew."""
    gone = _OWN | {_name(w) for w in given if w.startswith("--")}
    kept: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        alone = "=" in word or not rest or rest[0].startswith("--")
        value = [] if alone else [rest.pop(0)]
        if _name(word) not in gone:
            kept += [word, *value]
    return kept


def _name(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
