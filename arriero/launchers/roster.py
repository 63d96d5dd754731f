"""Which replicas each role of a run has: those that the graph gives it, and those that join and leave.

| a replica is | because                                         | until                                  |
|--------------|-------------------------------------------------|----------------------------------------|
| staying      | the graph has it, or it joined                  | it is told to leave                    |
| leaving      | it was told to; it answers what it has and ends | its process has ended, or been killed  |

A number is given once: what is named after a replica is named after nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable

from arriero.schemas.graph import GraphSpec


class Roster:
    """Numbers of replicas by role."""

    def __init__(self, spec: GraphSpec) -> None:
        self._all = {role: nodes[0].replicas for role, nodes in spec.roles.items()}
        self._leaving: dict[str, set[int]] = {role: set() for role in self._all}

    def __contains__(self, role: str) -> bool:
        return role in self._all

    def of(self, role: str) -> range:
        """All that there have been; each of them ends the edges of its nodes."""
        return range(self._all[role])

    def staying(self, role: str) -> list[int]:
        return [k for k in self.of(role) if k not in self._leaving[role]]

    def leaves(self, role: str, replica: int) -> bool:
        """Whether it was told to leave, however far it has come with that."""
        return replica in self._leaving[role]

    def join(self, role: str, count: int) -> tuple[int, ...]:
        """The numbers of `count` more."""
        first = self._all[role]
        self._all[role] += count
        return tuple(range(first, first + count))

    def leave(self, role: str, replicas: Iterable[int]) -> None:
        """These are told to leave."""
        self._leaving[role].update(replicas)
