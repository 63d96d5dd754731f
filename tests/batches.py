"""Random batches to train a tiny model on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arriero.schemas.messages import Batch, Sample


def random_sample(
    length: int,
    *,
    prompt: int = 1,
    seed: int = 0,
    vocab_size: int = 32,
    temperature: float = 1.0,
    supervised: bool = False,
    trained: bool = True,
) -> Sample:
    """`length` random tokens, those after the first `prompt` trained on unless `trained` is false."""
    rng = np.random.default_rng([seed, length, prompt])
    mask = np.arange(length) >= (prompt if trained else length)
    logprobs = np.where(mask, rng.normal(-3.4, 0.3, length), np.nan).astype(np.float32)
    return Sample(
        group=f"g{seed}",
        tokens=rng.integers(4, vocab_size, length).astype(np.int32),
        mask=mask,
        advantages=np.full(length, rng.normal(), dtype=np.float32),
        logprobs=None if supervised else logprobs,
        versions=None if supervised else np.where(mask, 0, -1).astype(np.int32),
        temperature=temperature,
        reward=float(seed % 2),
    )


def random_batch(
    lengths: Sequence[int], *, prompt: int = 1, seed: int = 0, temperature: float = 1.0
) -> Batch:
    """One random sample per length."""
    return Batch(
        samples=tuple(
            random_sample(n, prompt=min(prompt, n - 1), seed=seed + i, temperature=temperature)
            for i, n in enumerate(lengths)
        )
    )
