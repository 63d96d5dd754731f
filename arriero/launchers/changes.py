"""What a run that goes on is made of, against what it was made of before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import JsonValue

from arriero.engine.errors import UserError
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import RunManifest

_MOST = 60  # characters of a value that are shown


def changes(before: RunManifest, now: RunManifest) -> dict[str, str]:
    """By key, what differs, as `before -> now`: configuration, seed, code, packages, input files, content."""
    first, second = _made_of(before), _made_of(now)
    keys = dict.fromkeys((*first, *second))
    found = {k: f"{_shown(first, k)} -> {_shown(second, k)}" for k in keys if first.get(k) != second.get(k)}
    if not found and before.graph_digest != now.graph_digest:
        found["graph"] = f"{before.graph_digest[:12]} -> {now.graph_digest[:12]}"
    return found


def check_allowed(changed: Mapping[str, str], allowed: Collection[str]) -> None:
    """UserError, naming each change that isn't allowed, and each key that is allowed and didn't change.

    A key stands for itself and all below it: `optimizer` for `optimizer.lr`.
    """
    refused = [key for key in changed if not any(_covers(a, key) for a in allowed)]
    if refused:
        lines = [f"{key}: {changed[key]}" for key in refused]
        words = " ".join(f"--allow-change {key}" for key in refused[:3])
        raise UserError(
            "\n".join(["the run was made of something else:", *lines, f"go on all the same with {words}"])
        )
    if idle := [a for a in allowed if not any(_covers(a, key) for key in changed)]:
        raise UserError(f"--allow-change {idle[0]}: nothing of it has changed; leave it out")


def data_changed(before: GraphSpec, now: GraphSpec, changed: Collection[str]) -> bool:
    """Whether a source may give other records than before, so that what was under way can't be sent again."""
    sources = [n for n in now.nodes if not n.inputs]
    old = {n.name: n for n in before.nodes}
    return any(
        node.name not in old
        or old[node.name].config != node.config
        or any(_covers(f"input.{node.name}", key) for key in changed)
        for node in sources
    )


def _covers(allowed: str, key: str) -> bool:
    wanted = allowed.replace("-", "_")
    return key.replace("-", "_") == wanted or key.replace("-", "_").startswith(f"{wanted}.")


def _made_of(manifest: RunManifest) -> dict[str, JsonValue]:
    own: dict[str, JsonValue] = {
        "pipeline": manifest.pipeline.function,
        "seed": manifest.seed,
        "code": f"{manifest.package_sha256[:12]} {manifest.pipeline.sha256[:12]}",
        "python": manifest.python,
    }
    packages: dict[str, JsonValue] = {f"packages.{name}": v for name, v in manifest.packages.items()}
    inputs: dict[str, JsonValue] = {
        f"input.{i.key}.{Path(i.path).name}": i.sha256[:12] or f"{i.bytes} bytes of {i.changed_s}"
        for i in manifest.inputs
    }
    content: dict[str, JsonValue] = {}
    for kind in ("tokenizers", "chats", "rewards"):
        hashes: dict[str, str] = getattr(manifest.content, kind)
        content |= {f"{kind}.{place}": digest[:12] for place, digest in hashes.items()}
    return own | flat(manifest.config) | packages | inputs | content


def flat(value: Mapping[str, JsonValue], before: str = "") -> dict[str, JsonValue]:
    """A configuration by dotted key."""
    found: dict[str, JsonValue] = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            found |= flat(inner, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = inner
    return found


def _shown(values: Mapping[str, JsonValue], key: str) -> str:
    text = str(values[key]) if key in values else "nothing"
    return text if len(text) <= _MOST else text[: _MOST - 3] + "..."
