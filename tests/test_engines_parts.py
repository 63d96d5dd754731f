"""What engines are made of, without one: eight bits, log-probabilities, widened heads, checks."""

# pyright: reportUnknownMemberType=false
# torch and transformers are annotated only in part.

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from arriero.components.generator import Generator
from arriero.components.head_padding import HeadPadding, padding_for
from arriero.components.quantized import EightBits, QuantizedLinear
from arriero.components.sampling import Sampling
from arriero.components.vllm_engine import own_logprobs
from arriero.components.vllm_options import VLLMOptions
from tests.drive import Alone
from tests.engines import saved, small_llama


def test_eight_bits_are_as_far_off_as_their_type_says_and_what_is_not_finite_stays_so() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    x = torch.eye(64)
    kinds: list[tuple[EightBits, float]] = [("int8", 0.5 / 127), ("fp8", 2.0**-4)]
    layers = {kind: QuantizedLinear(torch.nn.Linear(64, 40, bias=False), kind) for kind, _ in kinds}
    for kind, most in kinds:
        layer = layers[kind]
        layer.take(weight)
        assert (layer.q.element_size(), layer.q.shape) == (1, (40, 64))
        with torch.no_grad():
            got: torch.Tensor = layer(x).T
        # int8: half a step of a row; float8 with 3 bits behind the point: half a unit of the last one.
        scale = weight.abs().amax(1, keepdim=True) if kind == "int8" else weight.abs() + 2e-3
        assert bool(((got - weight).abs() <= most * scale * 1.01).all())
    weight[3, 5] = math.nan
    for layer in layers.values():
        layer.take(weight)
        finite: torch.Tensor = layer(torch.ones(1, 64)).isfinite()
        assert finite.logical_not().nonzero()[:, 1].tolist() == [3]


def _flat(positions: Sequence[dict[int, float]]) -> Any:
    """As vLLM records it: several tokens per position, in one list."""
    ends = np.cumsum([len(p) for p in positions]).tolist()
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[t for p in positions for t in p],
        logprobs=[v for p in positions for v in p.values()],
    )


def test_the_log_probability_of_a_token_is_its_own_and_never_the_first_entry() -> None:
    tokens = np.array([7, 8, 9], np.int32)
    given = _flat([{3: -0.1, 7: -2.5}, {8: -0.5}, {9: -3.0, 1: -0.2}])
    np.testing.assert_allclose(own_logprobs(tokens, given), [-2.5, -0.5, -3.0])


def test_a_log_probability_that_is_missing_is_nan_and_never_zero() -> None:
    tokens = np.array([7, 8, 9], np.int32)
    assert np.isnan(own_logprobs(tokens, _flat([{7: -1.0}, {5: -1.0}, {9: -1.0}]))).tolist() == [
        False,
        True,
        False,
    ]
    assert np.isnan(own_logprobs(tokens, _flat([{7: -1.0}, {8: -1.0}]))).all()
    assert np.isnan(own_logprobs(tokens, None)).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_a_model_with_widened_heads_is_the_same_function(bias: bool, rope: str) -> None:
    ropes: dict[str, Any] = {
        "default": {"rope_type": "default", "rope_theta": 500.0},
        "llama3": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    }  # fmt: skip
    shape: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "attention_bias": bias,
        "max_position_embeddings": 128, "rope_parameters": ropes[rope],
    }  # fmt: skip
    torch.default_generator.manual_seed(0)
    narrow = LlamaForCausalLM(LlamaConfig(head_dim=8, **shape)).double().train(False)
    wide = LlamaForCausalLM(LlamaConfig(head_dim=32, **shape)).double().train(False)
    with torch.no_grad():
        for p in narrow.parameters():
            p.normal_(std=0.3)
        padding = HeadPadding(narrow=8, wide=32)
        wide.load_state_dict({n: padding.widen(n, t) for n, t in narrow.state_dict().items()})
        tokens = torch.randint(32, (3, 100))
        torch.testing.assert_close(wide(tokens).logits, narrow(tokens).logits, rtol=1e-8, atol=1e-8)


def test_heads_that_cannot_be_widened_are_refused_with_the_remedy(tmp_path: Path) -> None:
    saved(small_llama(), tmp_path)
    assert padding_for(tmp_path, (32, 64)) is None
    assert padding_for(tmp_path, (64, 96)) == HeadPadding(narrow=32, wide=64)
    with pytest.raises(ValueError, match=r"heads of 32 numbers don't fit.*set engine=transformers"):
        padding_for(tmp_path, (80,))


def test_check_refuses_what_an_engine_does_not_read_or_cannot_do(tmp_path: Path) -> None:
    model = saved(small_llama(), tmp_path)

    def problems(**options: Any) -> str:
        return "\n".join(Generator(model=model, **options).problems(Alone()))

    assert problems() == ""
    assert "set engine=vllm or leave these out" in problems(vllm=VLLMOptions(tensor_parallel=2))
    greedy = problems(engine="vllm", sampling=Sampling(greedy=True, temperature=0.5))
    assert "log-probabilities of temperature 1" in greedy
    assert "precision int8 with engine=vllm" in problems(engine="vllm", precision="int8")
    second: dict[str, Any] = {"engine": "vllm", "evaluation_engine": "own"}
    assert "vllm.memory_share=0.85 leaves no room for it" in problems(**second)
    assert "leaves no room" not in problems(**second, vllm=VLLMOptions(memory_share=0.4))
