"""Which roles may be scaled while a run goes on: those of which check would accept any number of replicas."""

from __future__ import annotations

from arriero.engine.check import replica_problems
from arriero.engine.errors import UserError
from arriero.engine.graph import Graph
from arriero.schemas.graph import GraphSpec


def scaled(spec: GraphSpec, role: str, replicas: int) -> GraphSpec:
    """The graph with so many replicas of `role`."""
    nodes = (n.model_copy(update={"replicas": replicas}) if n.role == role else n for n in spec.nodes)
    return spec.model_copy(update={"nodes": tuple(nodes)})


def elastic_roles(spec: GraphSpec) -> frozenset[str]:
    """The roles that may be scaled."""
    return frozenset(role for role in spec.roles if not _problems(spec, role))


def check_role(spec: GraphSpec, role: str) -> None:
    """Raises UserError that says in one line why `role` can't be scaled."""
    if problems := _problems(spec, role):
        raise UserError(problems[0])


def check_scaled(spec: GraphSpec, role: str, replicas: int) -> None:
    """Raises UserError and GraphError for what the check has against so many replicas of `role`."""
    Graph.from_spec(scaled(spec, role, replicas)).check()


def _problems(spec: GraphSpec, role: str) -> list[str]:
    two = scaled(spec, role, 2)
    return [problem for n in two.roles[role] for problem in replica_problems(two, n)]
