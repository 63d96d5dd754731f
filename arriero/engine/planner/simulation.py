"""The graph in simulated time: specification and rules of admission, capacity and staleness as in a run."""

from __future__ import annotations

from arriero.engine.planner.scenario import Scenario
from arriero.engine.planner.sim_bursts import BurstSimulation
from arriero.engine.planner.sim_events import EventSimulation
from arriero.engine.planner.sim_line import line_of
from arriero.engine.planner.trace import Trace
from arriero.schemas.graph import GraphSpec


def simulate(spec: GraphSpec, scenario: Scenario) -> Trace:
    """Run `spec` until `scenario.steps` versions are made: by bursts where that is exact, else by events."""
    line = line_of(spec, scenario)
    return BurstSimulation(line, scenario).run() if line else EventSimulation(spec, scenario).run()
