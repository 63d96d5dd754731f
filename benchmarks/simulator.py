"""How fast graphs are simulated: the pipeline `aipo` itself, from 64 to 16,384 generators.

    python benchmarks/simulator.py [--steps 1000] [--largest 16384] [--staleness 1] [--json]

Every generator gets one group a step on average; response times are log-normal with a long tail, rewards take
0.3 s on one replica per 32 generators, training is as long as generation on average.
"""

import argparse
import json
import time

from arriero.components.prompts import PromptSource
from arriero.engine.planner.scenario import Scenario
from arriero.engine.planner.simulation import simulate
from arriero.engine.planner.times import Duration, Fixed, LogNormal
from arriero.engine.planner.trace import Trace
from arriero.pipelines.aipo import AIPOConfig, aipo
from arriero.schemas.graph import GraphSpec

TIMES: dict[str, Duration] = {
    "generator": LogNormal(median=40, sigma=0.6, longest=300),
    "reward": Fixed(0.3),
    "trainer": Fixed(48.0),
}


def graph(generators: int, staleness: int) -> GraphSpec:
    config = AIPOConfig(
        model="not-read", data=PromptSource(path="not-read"), generators=generators, staleness=staleness,
        groups_per_step=generators, rewards=max(1, generators // 32),
    )  # fmt: skip
    return aipo(config).spec()


def measured(generators: int, steps: int, staleness: int) -> tuple[Trace, float, float]:
    """The trace, wall seconds and CPU seconds."""
    spec = graph(generators, staleness)
    wall, cpu = time.perf_counter(), time.process_time()
    trace = simulate(spec, Scenario(times=TIMES, steps=steps, sync_s=2.0))
    return trace, time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast graphs are simulated.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--largest", type=int, default=16384)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: list[dict[str, float]] = []
    for generators in (n for n in (64, 1024, 4096, 16384) if n <= options.largest):
        trace, wall, cpu = measured(generators, options.steps, options.staleness)
        row = {
            "generators": generators, "steps": trace.steps, "firings": trace.events, "wall_s": wall,
            "cpu_s": cpu, "firings_per_cpu_s": trace.events / cpu, "step_s": trace.step_s(),
            "dropped": trace.dropped,
        }  # fmt: skip
        found.append(row)
        if not options.json:
            print("  ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
