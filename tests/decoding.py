"""What tests of the decode engine share: prompts, engines, and all that is sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from arriero.components.decoding import DecodeEngine
from arriero.components.rollout_engine import Completion, Request
from arriero.components.sampling import Sampling
from tests.tiny_models import EOS, tiny_tokenizer

PROMPTS = ((5, 6, 7), (9, 8, 7, 6, 5, 4, 10, 11), (12,), (30, 4, 4, 20, 21), (5, 6, 7))


def engine_of(
    model: PreTrainedModel, sampling: Sampling, *, slots: int = 4, max_length: int = 48, **options: Any
) -> DecodeEngine:
    return DecodeEngine(model, tiny_tokenizer(), sampling, slots=slots, max_length=max_length, **options)


def endless(model: Any) -> PreTrainedModel:
    """The model with an end-of-sequence token that it never draws."""
    bias = torch.zeros(model.config.vocab_size)
    bias[EOS] = -math.inf
    model.lm_head.bias = torch.nn.Parameter(bias)
    changed: PreTrainedModel = model
    return changed


def requests(prompts: Sequence[Sequence[int]], *, seed: int = 0) -> list[Request]:
    return [Request(key=str(i), prompt_ids=prompt, seed=seed + i) for i, prompt in enumerate(prompts)]


def run_all(engine: DecodeEngine, waiting: Sequence[Request]) -> dict[str, Completion]:
    """Everything sampled, each request added as soon as there is room for it."""
    waiting = list(waiting)
    done: dict[str, Completion] = {}
    while waiting or not engine.idle:
        now, waiting = waiting[: engine.room()], waiting[engine.room() :]
        engine.add(now)
        done |= {completion.key: completion for completion in engine.step()}
    return done
