"""The toy graph as a pipeline that any scheduler can run; `fault` is committed by the generator."""

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.graph import Graph
from tests.toys import Fault, ToyGenerator, ToyPrompts, ToyTrainer, toy_graph


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class ToyConfig:
    steps: PositiveInt = 3
    seconds: NonNegativeFloat = 0.05
    until: str = ""
    generators: PositiveInt = 2
    generator_s: NonNegativeFloat = 0.0
    ranks: PositiveInt = 1
    text_bytes: PositiveInt = 3
    fault: Fault = ""
    fault_at: NonNegativeInt = 3
    guests: Fault = ""


def toy_run(cfg: ToyConfig) -> Graph:
    """Toy components that sleep instead of computing."""
    return toy_graph(
        prompts=ToyPrompts(
            count=1000 + 4 * cfg.steps
        ),  # four groups a step, and what is under way at the end
        generator=ToyGenerator(
            fault=cfg.fault,
            fault_at=cfg.fault_at,
            text_bytes=cfg.text_bytes,
            seconds=cfg.generator_s,
            guests=cfg.guests,
        ),
        trainer=ToyTrainer(steps=cfg.steps, seconds=cfg.seconds, until=cfg.until),
        generators=cfg.generators,
        ranks=cfg.ranks,
    )
