"""The engine for throughput: vLLM, stepped in the role's own process.

One call of `step` is one step of vLLM's scheduler and model, in the generator's compute thread. There is no
queue between us and the scheduler: weights, cancellations and new requests take effect at the next step, and
the version of a token is known without a clock. With `tensor_parallel` above 1 the workers are processes of
their own, which each take the weights from shared memory by name; the scheduler stays here.

Prefix caches: the key of a cached block holds the version that its request began under, so that a prompt
never meets keys and values of older weights; `recompute` also empties the cache. Requests that have waited
without a token when new weights come begin anew, under the new version.

Random numbers: vLLM draws for all requests of a step from one stream. It begins anew, from the seeds of the
requests, whenever an idle engine gets requests: a group that is alone in the engine is reproducible.
"""

# pyright: reportUnknownMemberType=false
# transformers annotates only a part of what is called here.

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from arriero.components.causal_lm import end_ids
from arriero.components.model_directory import loading
from arriero.components.rollout_engine import Completion, Request, check_requests
from arriero.components.sampling import StopStrings
from arriero.components.vllm_start import leave, sleeps, start
from arriero.engine.weights import SenderGone, StaleWeights, WeightError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arriero.components.generator import Generator
    from arriero.components.vllm_worker import Arrived
    from arriero.engine.runtime.context import Context
    from arriero.schemas.weights import WeightManifest

_POLL_S = 2e-3


class VLLMEngine:
    """A `RolloutEngine` on vLLM. Several in one process share its process group of one.

    What vLLM knows of the batch under way is of the whole process, so that they work one at a time.
    """

    _alive: ClassVar[int] = 0
    _one: ClassVar = threading.RLock()

    def __init__(self, config: Generator, context: Context, tokenizer: PreTrainedTokenizerBase) -> None:
        model, generation = _configs(config.model)
        self.version = -1
        self.max_length = config.context or int(getattr(model, "max_position_embeddings", 4096))
        self.vocabulary: int | None = getattr(model, "vocab_size", None)
        self._config = config
        self._stop = StopStrings(tokenizer, config.sampling.stop)
        self._deterministic = context.deterministic
        self._ends = sorted(end_ids(generation, model, tokenizer))
        with self._one:
            self._llm = start(config, model, self.max_length, context)
            VLLMEngine._alive += 1
        self._inputs: Any = import_module("vllm.inputs.engine")
        self._sampling: Any = import_module("vllm.sampling_params")
        self._open: dict[str, Request] = {}
        self.receives_beside = config.placement.devices == "apart"  # into host memory at least
        self._sleeps, self._asleep = sleeps(config), 0
        self._last: WeightManifest | None = None
        self._ready: int | None = None  # the version that every rank has, but doesn't use yet

    @property
    def idle(self) -> bool:
        return not self._open

    def room(self) -> int:
        return self._config.slots - len(self._open)

    def add(self, requests: Sequence[Request]) -> None:
        check_requests(
            requests,
            running=self._open,
            room=self.room(),
            max_length=self.max_length,
            most=self._config.sampling.max_new_tokens,
        )
        if self.idle and requests:
            self._begin_anew([request.seed + request.sampled for request in requests])
        for request in requests:
            self._submit(request)
            self._open[request.key] = request

    def cancel(self, key: str) -> None:
        if self._open.pop(key, None) is not None:
            self._llm.abort_request([key])

    def step(self) -> list[Completion]:
        if self.idle:
            return []
        if self._wake() == 2 and self._last is not None:
            self.take(self._last)
        with self._one:
            ended = [output for output in self._llm.step() if output.finished]
        done = [self._completion(output) for output in ended if output.request_id in self._open]
        for completion in done:
            del self._open[completion.key]
        return done

    def sleep(self, level: int) -> None:
        if self._sleeps and not self._asleep:
            self._asleep = level
            with self._one:
                self._llm.sleep(level)

    def prepare(self, manifest: WeightManifest) -> None:
        """Into host memory, and with `standby` into a twin of the model too."""
        self._begin(manifest)
        while not self._has_arrived(manifest, wait=False):
            time.sleep(_POLL_S)  # workers in other processes can't wake us

    def take(self, manifest: WeightManifest) -> None:
        self._wake()
        self._last = manifest
        if self._ready != manifest.version:
            self._begin(manifest)
            self._has_arrived(manifest, wait=True)
        self._ready = None
        with self._one:
            self._llm.collective_rpc("use_weights")
        self._llm.set_weight_version(str(manifest.version))
        self.version = manifest.version
        if self._config.kv_cache == "recompute":
            self._llm.reset_prefix_cache(reset_running_requests=True)
        else:
            for key in self._without_tokens():
                self._llm.abort_request([key])
                self._submit(self._open[key])

    def close(self) -> None:
        if self._open:
            self._llm.abort_request(list(self._open))
            self._open.clear()
        with self._one:
            self._llm.collective_rpc("close_intake")
            self._llm.engine_core.shutdown()
            VLLMEngine._alive -= 1
            if not VLLMEngine._alive:
                leave()

    def _begin(self, manifest: WeightManifest) -> None:
        self._ready = None
        with self._one:
            self._llm.collective_rpc("begin_weights", args=(manifest.model_dump_json(),))

    def _has_arrived(self, manifest: WeightManifest, *, wait: bool) -> bool:
        """Whether every rank has the version; raises what the weight plane raises, once no rank writes."""
        with self._one:
            ranks: list[Arrived | None] = self._llm.collective_rpc("arrived", kwargs={"wait": wait})
        ended = [rank for rank in ranks if rank is not None]
        if len(ended) < len(ranks):
            return False
        for rank in sorted(ended, key=lambda rank: rank.stale or rank.gone):  # an error before what is none
            if rank.error:
                kind = StaleWeights if rank.stale else SenderGone if rank.gone else WeightError
                raise kind(rank.error)
        self._ready = manifest.version
        return True

    def _wake(self) -> int:
        """At which level it slept; 0: not at all."""
        level, self._asleep = self._asleep, 0
        if level:
            with self._one:
                self._llm.wake_up()
        return level

    def _begin_anew(self, seeds: Sequence[int]) -> None:
        if self._deterministic:
            # Blocks that another group left would be computed in another batch, and differ in the last bit.
            self._llm.reset_prefix_cache()
        digest = hashlib.blake2b(repr(seeds).encode(), digest_size=8).digest()
        self._llm.collective_rpc("seed_sampling", args=(int.from_bytes(digest, "little") >> 1,))

    def _submit(self, request: Request) -> None:
        sampling = self._config.sampling
        greedy = sampling.greedy or request.greedy
        prompt = self._inputs.tokens_input(
            np.asarray(request.prompt_ids).tolist(), cache_salt=str(self.version)
        )
        params = self._sampling.SamplingParams(
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            max_tokens=request.max_new_tokens or sampling.max_new_tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=list(self._ends),
            logprobs=0,  # besides the sampled token's own
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=self._sampling.RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # they are this request's alone; a deep copy costs as much as some of its tokens
        )
        self._llm.add_request(request.key, prompt, params)

    def _without_tokens(self) -> list[str]:
        states = self._llm.output_processor.request_states.values()
        return [
            state.external_req_id
            for state in states
            if state.external_req_id in self._open and state.detokenizer.num_output_tokens() == 0
        ]

    def _completion(self, output: Any) -> Completion:
        (response,) = output.outputs
        token_ids, finish = np.asarray(response.token_ids, np.int32), response.finish_reason
        if (end := self._earlier_end(self._open[output.request_id], token_ids)) is not None:
            token_ids, finish = token_ids[:end], "stop"
        logprobs = own_logprobs(np.asarray(response.token_ids, np.int32), response.logprobs)[: len(token_ids)]
        versions = np.full(len(token_ids), self.version, np.int32)
        for span in response.weight_versions or ():
            versions[span.start : span.end] = int(span.version)
        bad = np.flatnonzero(~np.isfinite(logprobs))
        used = slice(0, int(bad[0]) if len(bad) else None)
        return Completion(
            key=output.request_id,
            token_ids=token_ids[used],
            logprobs=logprobs[used],
            versions=versions[used],
            finish="error" if len(bad) else "stop" if finish == "stop" else "length",
        )

    def _earlier_end(self, request: Request, token_ids: NDArray[np.int32]) -> int | None:
        """After how many tokens a stop string of an earlier segment, to vLLM part of the prompt, ends."""
        before = min(request.sampled, self._stop.window)
        if not before or not self._config.sampling.stop:
            return None
        head = np.asarray(request.prompt_ids[-before:], np.int32)
        ends = range(1, min(len(token_ids), self._stop.window) + 1)
        return next((n for n in ends if self._stop(np.concatenate([head, token_ids[:n]]))), None)


def _configs(directory: str) -> tuple[Any, Any]:
    """The model's config and its generation config; None for one that isn't there."""
    from transformers import AutoConfig, GenerationConfig

    configs: Any = AutoConfig  # what it gives is typed in part
    with loading(directory):
        model = configs.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        if not (Path(directory) / "generation_config.json").is_file():
            return model, None
        return model, GenerationConfig.from_pretrained(directory, local_files_only=True)


def own_logprobs(token_ids: NDArray[np.int32], flat: Any) -> NDArray[np.float32]:
    """Log-probability [R] of each token itself in vLLM's flat record of several tokens per position.

    NaN where its own is missing; NaN throughout if there isn't one position per token.
    """
    own = np.full(len(token_ids), np.nan, np.float32)
    if flat is None or len(flat.start_indices) != len(token_ids):
        return own
    if len(flat.token_ids) == len(token_ids) and np.array_equal(flat.token_ids, token_ids):
        return np.asarray(flat.logprobs, np.float32)  # one token per position, and it is the one
    for i, (token, begin, end) in enumerate(
        zip(token_ids.tolist(), flat.start_indices, flat.end_indices, strict=True)
    ):
        for j in range(begin, end):
            if flat.token_ids[j] == token:
                own[i] = flat.logprobs[j]
                break
    return own
