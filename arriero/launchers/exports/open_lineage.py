"""A run as events of OpenLineage (https://openlineage.io), made and written by its official client.

A run directory's model and record are data sets with the names of their folders, so that the run that made
them and one that took them up meet in any store of such events.
"""

from __future__ import annotations

from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import arriero
from arriero.launchers.exports.subject import Subject

_NAMESPACE = "arriero"
_PRODUCER = f"urn:arriero:{arriero.__version__}"
_ENDS = {"finished": "COMPLETE", "failed": "FAIL", "stopped": "ABORT"}


def write(about: Subject, path: Path) -> str:
    client: Any = import_module("openlineage.client")
    files: Any = import_module("openlineage.client.transport.file")
    facets: Any = import_module("openlineage.client.facet_v2")
    facets.set_producer(_PRODUCER)
    path.unlink(missing_ok=True)
    transport = files.FileTransport(files.FileConfig(log_file_path=str(path), append=True))
    sender = client.OpenLineageClient(transport=transport)
    made = events(about)
    for event in made:
        sender.emit(event)
    sender.close()
    return f"{len(made)} events in {path}"


def events(about: Subject) -> list[Any]:
    """START, and if the run is over COMPLETE, FAIL or ABORT."""
    library: Any = import_module("openlineage.client.event_v2")
    states = library.RunState
    kinds: list[tuple[Any, datetime]] = [(states.START, about.manifest.started)]
    if (ended := about.ended) is not None:
        kinds.append((states[_ENDS[about.state]], ended))
    job = library.Job(namespace=_NAMESPACE, name=about.pipeline, facets=_job(about))
    return [
        library.RunEvent(
            eventType=kind,
            eventTime=at.isoformat(),
            run=library.Run(runId=str(uuid5(NAMESPACE_URL, about.manifest.run_id)), facets=_run(about, kind)),
            job=job,
            producer=_PRODUCER,
            inputs=_inputs(about, library),
            outputs=_outputs(about, library) if kind != states.START else [],
        )
        for kind, at in kinds
    ]


def _run(about: Subject, kind: Any) -> dict[str, Any]:
    f: Any = import_module("openlineage.client.facet_v2")
    parameters = f.execution_parameters_run
    found: dict[str, Any] = {
        "processing_engine": f.processing_engine_run.ProcessingEngineRunFacet(
            version=arriero.__version__, name="arriero"
        ),
        "executionParameters": parameters.ExecutionParametersRunFacet(
            parameters=[parameters.ExecutionParameter(key=k, value=v) for k, v in about.parameters().items()]
        ),
        "tags": f.tags_run.TagsRunFacet(
            tags=[
                f.tags_run.TagsRunFacetFields(key=k, value=str(v), source="arriero")
                for k, v in {"run": about.manifest.run_id, "head": about.head, **about.results()}.items()
            ]
        ),
    }
    if kind.name == "FAIL" and about.summary is not None:
        found["errorMessage"] = f.error_message_run.ErrorMessageRunFacet(
            message=about.summary.error, programmingLanguage="python"
        )
    return found


def _job(about: Subject) -> dict[str, Any]:
    f: Any = import_module("openlineage.client.facet_v2")
    found: dict[str, Any] = {
        "jobType": f.job_type_job.JobTypeJobFacet(
            processingType="BATCH", integration="ARRIERO", jobType="TRAINING"
        ),
        "documentation": f.documentation_job.DocumentationJobFacet(
            description=f"{about.manifest.pipeline.function}, graph {about.manifest.graph_digest}"
        ),
    }
    for code in about.manifest.code[:1]:
        found["sourceCodeLocation"] = f.source_code_location_job.SourceCodeLocationJobFacet(
            type="git", url=Path(code.root).as_uri(), version=code.commit
        )
    return found


def _inputs(about: Subject, library: Any) -> list[Any]:
    files = {file.path: file.sha256 for file in about.manifest.inputs}
    files |= {str(Path(a.run_dir) / _FOLDERS[a.took]): a.sha256 for a in about.manifest.ancestors}
    return [library.InputDataset(**_dataset(path, version)) for path, version in files.items()]


_FOLDERS = {"model": "model", "record": "lineage"}


def _outputs(about: Subject, library: Any) -> list[Any]:
    run, found = about.run, list[Any]()
    if run.model.is_dir():
        found.append(library.OutputDataset(**_dataset(str(run.model), "")))
    if run.lineage.is_dir():
        found.append(library.OutputDataset(**_dataset(str(run.lineage), about.head)))
    return found


def _dataset(path: str, version: str) -> dict[str, Any]:
    f: Any = import_module("openlineage.client.facet_v2")
    facet = f.dataset_version_dataset.DatasetVersionDatasetFacet
    return {
        "namespace": "file",
        "name": str(Path(path).resolve()),
        "facets": {"version": facet(datasetVersion=version)} if version else {},
    }
