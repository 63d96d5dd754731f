"""A run in the words of W3C PROV: https://www.w3.org/TR/prov-overview/, written as PROV-JSON.

data, model -> used by -> run;  weights v-1 and batch v -> used by -> step v -> generated -> weights v
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import arriero
from arriero.engine.lineage.reader import Lineage
from arriero.launchers.exports.subject import Subject

_NAMESPACE = "urn:arriero:"


def write(about: Subject, path: Path) -> str:
    model: Any = import_module("prov.model")
    document = model.ProvDocument()
    document.add_namespace("arriero", _NAMESPACE)
    document.add_namespace("run", f"{_NAMESPACE}{about.manifest.run_id}:")
    run = _run(document, about)
    steps = 0
    if about.run.lineage.exists():
        steps = _steps(document, Lineage(str(about.run.path)), run)
    text: str = document.serialize(format="json", indent=1)
    path.write_text(text, encoding="utf-8")
    return f"{steps} steps in {path}"


def _run(document: Any, about: Subject) -> Any:
    """The run as an activity of arriero, with what it used and left."""
    m = about.manifest
    software = document.agent(
        "arriero:software", {"prov:type": "prov:SoftwareAgent", "arriero:version": arriero.__version__}
    )
    run = document.activity(
        "run:run", m.started, about.ended,
        {"arriero:pipeline": m.pipeline.function, "arriero:graph": m.graph_digest, "arriero:seed": m.seed,
         "arriero:state": about.state},
    )  # fmt: skip
    document.wasAssociatedWith(run, software)
    for k, file in enumerate(m.inputs):
        used = {"arriero:path": file.path, "arriero:key": file.key, "arriero:sha256": file.sha256}
        document.used(run, document.entity(f"run:input-{k}", used))
    for k, a in enumerate(m.ancestors):
        made = {"arriero:run": a.run_id, "arriero:took": a.took, "arriero:sha256": a.sha256}
        document.used(run, document.entity(f"run:ancestor-{k}", made))
    if about.head:
        record = document.entity("run:record", {"arriero:head": about.head})
        document.wasGeneratedBy(record, run)
    return run


def _steps(document: Any, record: Lineage, run: Any) -> int:
    """Versions of the weights and the steps between them, of each node that trains."""
    prints = {w.version: w.fingerprint for w in record.weights}
    known: dict[str, Any] = {}

    def weights(node: str, version: int) -> Any:
        name = f"run:{node}-weights-{version}"
        if name not in known:
            told = {"arriero:version": version, "arriero:fingerprint": prints.get(version, "")}
            known[name] = document.entity(name, told)
        return known[name]

    for s in record.steps:
        told = {f"arriero:{k}": v for k, v in s.metrics.items() if k in ("loss", "grad_norm")}
        step = document.activity(f"run:{s.node}-step-{s.version}", None, None, told)
        document.wasInformedBy(step, run)
        entry = record.batches.get(s.batch)
        about = {"arriero:id": s.batch, "arriero:tokens": s.tokens, "arriero:reward": s.reward_mean}
        if entry is not None:
            about |= {"arriero:sha256": entry.sha256, "arriero:samples": len(entry.group)}
        document.used(step, document.entity(f"run:{s.node}-batch-{s.version}", about))
        before, after = weights(s.node, s.version - 1), weights(s.node, s.version)
        document.used(step, before)
        document.wasGeneratedBy(after, step)
        document.wasDerivedFrom(after, before)
    return len(record.steps)
