"""What a generator needs of an inference engine: one contract, whatever decodes.

Between two calls of `step` an engine may get new requests, lose some, or `take` a version of the weights:
what is running goes on with it. So control never waits for more than one decoding step, however many requests
are queued. An engine is used by one thread at a time.

    requests -> add -> step, step, step -> completions, each as soon as it ends
                         ^ take: weights, between two steps

| engine | module | for |
|---|---|---|
| `transformers` | `transformers_engine` | nothing else to install; tiny models |
| `vllm` | `vllm_engine` | throughput: paged cache, fused kernels, tensor parallelism |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arriero.components.generator import Generator
    from arriero.engine.runtime.context import Context
    from arriero.schemas.weights import WeightManifest

EngineName = Literal["transformers", "vllm"]

EvaluationEngine = Literal["auto", "own", "same"]
"""What samples held-out prompts while training goes on."""

Finish = Literal["stop", "length", "error"]

KVCache = Literal["keep", "recompute"]
"""What becomes of running requests' keys and values when new weights come: kept, as PipelineRL does
(arXiv:2509.19128), or computed again, as AReaL does (arXiv:2505.24298)."""


EnginePrecision = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
"""Of an engine's weights. In `fp8` and `int8` projections have eight bits with a scale per output, made as
the weights arrive, and all else is bfloat16."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One response to sample. Those added together with an equal prompt share the work on it.

    To go on with a response, its tokens stand at the end of `prompt_ids`; `sampled` says how many they are,
    for a stop string may begin in them. `greedy`: as in `Sampling`, for this request alone.
    """

    key: str
    prompt_ids: Sequence[int] | NDArray[np.int32]  # [L], at least one
    seed: int  # in [0, 2**64)
    max_new_tokens: int | None = None  # None: as in the engine's `Sampling`; at most that
    sampled: int = 0
    greedy: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What was sampled, the token that ended it included. "error": the logits after it were not finite."""

    key: str
    token_ids: NDArray[np.int32]  # [R]
    logprobs: NDArray[np.float32]  # [R], nats, of the distribution that was sampled from
    versions: NDArray[np.int32]  # [R], of the weights that gave the token
    finish: Finish


def check_requests(
    requests: Sequence[Request], *, running: Collection[str], room: int, max_length: int, most: int
) -> None:
    """ValueError, naming the request and the limit, unless an engine can take all of them.

    `running`: keys under way; `room`: requests that may be added; `most`: new tokens of any request.
    """
    if len(requests) > room:
        raise ValueError(f"{len(requests)} requests, but room for {room}; ask room() first")
    keys = set(running)
    for request in requests:
        limit = most if request.max_new_tokens is None else request.max_new_tokens
        length, longest = len(request.prompt_ids), max_length - limit
        if not 0 < limit <= most:
            raise ValueError(f"request {request.key!r}: max_new_tokens is {limit}, but must lie in 1..{most}")
        if not 0 < length <= longest:
            raise ValueError(
                f"request {request.key!r}: the prompt has {length} tokens, but must have 1..{longest}: "
                f"max_length is {max_length}, and {limit} of it are for new tokens; raise it"
            )
        if not 0 <= request.seed < 2**64:
            raise ValueError(f"request {request.key!r}: seed is {request.seed}, but must lie in [0, 2**64)")
        if request.key in keys:
            raise ValueError(f"request {request.key!r} is already under way; give every request its own key")
        keys.add(request.key)


class RolloutEngine(Protocol):
    """Samples responses for `Sampling`, up to a number of slots at once.

    `max_length`: tokens of a sequence, prompt included. `vocabulary`: ids the model knows, if it says so.
    `version`: of the weights in use, -1 before the first `take`. `receives_beside`: `prepare` receives, so
    that less is left for `take`.
    """

    version: int
    receives_beside: bool

    @property
    def max_length(self) -> int: ...

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits: `step` would do nothing."""
        ...

    def room(self) -> int:
        """How many requests may be added now."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests up at the next step. Raises ValueError, taking none, if one can't run."""
        ...

    def cancel(self, key: str) -> None:
        """Forget a request and free what it holds; one that is unknown or finished is no error."""
        ...

    def step(self) -> list[Completion]:
        """One token for every running request; gives the requests that ended."""
        ...

    def prepare(self, manifest: WeightManifest) -> None:
        """Receive a version beside the one in use; may run in another thread, while the engine steps.

        What isn't prepared `take` receives itself, as engines do that know no second set of weights.
        """
        ...

    def take(self, manifest: WeightManifest) -> None:
        """Put a published version in use, verified; running requests go on with it, cached prompts don't.

        Raises what the weight plane raises.
        """
        ...

    def sleep(self, level: int) -> None:
        """Give back the device's memory while idle; the next `take` or `step` takes it again.

        Level 1 keeps the weights on the host; 2 drops them, and without a newer version the last one is
        taken once more.
        """
        ...

    def close(self) -> None:
        """Give back memory, processes and leases; what still runs is dropped."""
        ...


def open_engine(config: Generator, context: Context, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """The engine that `config` asks for, loaded. UserError if the model or the machine can't do it."""
    if config.engine == "vllm":
        from arriero.components.vllm_engine import VLLMEngine

        return VLLMEngine(config, context, tokenizer)
    from arriero.components.transformers_engine import TransformersEngine

    return TransformersEngine(config, context, tokenizer)
