"""The plan of a toy graph on a cluster, and one role's place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arriero.launchers.cluster import Plan, plan
from arriero.launchers.profile import (
    Profile,
)  # fmt: skip
from arriero.schemas.graph import GraphSpec
from tests.toys import toy_graph


def placed(
    profile: Profile,
    spec: GraphSpec | None = None,
    *,
    run_id: str = "toy-1",
    generators: int = 1,
    ranks: int = 1,
    groups: int = 4,
    hubs: int = 1,
) -> Plan:
    return plan(
        spec or toy_graph(generators=generators, ranks=ranks, groups=groups).check(), profile,
        run_id=run_id, run_dir="/shared/toy-1", description=Path("/shared/toy-1"), code="c0de",
        hubs=hubs,
    )  # fmt: skip


def place(plan: Plan, role: str) -> dict[str, Any]:
    return next(p.model_dump() for p in plan.places if p.role == role)
