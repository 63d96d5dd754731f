"""Numbers that other implementations give for algorithms; tests that need them skip where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, JsonValue, TypeAdapter

_FILE = Path(__file__).parents[1].parent / "shared" / "cases" / "algo_oracles.json"


class Oracle(BaseModel):
    """One case: what went in and what the other implementation gave."""

    id: str
    inputs: dict[str, JsonValue]
    outputs: dict[str, JsonValue]

    def vector(self, name: str) -> list[float]:
        return TypeAdapter(list[float]).validate_python(self._value(name))

    def matrix(self, name: str) -> list[list[float]]:
        return TypeAdapter(list[list[float]]).validate_python(self._value(name))

    def output(self, name: str) -> list[list[float]]:
        """A matrix that came out, where one of the same name went in."""
        return TypeAdapter(list[list[float]]).validate_python(self.outputs[name])

    def number(self, name: str) -> float:
        return TypeAdapter(float).validate_python(self._value(name))

    def groups(self, values: str = "scores") -> dict[str, list[float]]:
        """`values` by the group they belong to, in the order of the case."""
        names = TypeAdapter(list[str]).validate_python(self.inputs["group"])
        grouped: dict[str, list[float]] = {name: [] for name in names}
        for name, value in zip(names, self.vector(values), strict=True):
            grouped[name].append(value)
        return grouped

    def _value(self, name: str) -> JsonValue:
        return self.inputs[name] if name in self.inputs else self.outputs[name]


class _Cases(BaseModel):
    cases: list[Oracle]


def every_oracle() -> list[Oracle]:
    """All cases; skips the test if the file isn't there."""
    if not _FILE.is_file():
        pytest.skip("the numbers of other implementations aren't here: shared/cases/algo_oracles.json")
    return _Cases.model_validate_json(_FILE.read_bytes()).cases


def oracle(case: str) -> Oracle:
    """The case of this id; skips the test if the file isn't there."""
    return next(c for c in every_oracle() if c.id == case)
