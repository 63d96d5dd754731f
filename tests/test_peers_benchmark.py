"""The parts of the side-by-side benchmark that its figures rest on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from benchmarks.peer.meter import Meter, per_step
from benchmarks.peer.plain import Sampler, update
from benchmarks.peer.work import EOS, GROUPS, SAMPLES, new_model, order, right

torch.set_num_threads(1)


def test_the_plain_loop_samples_from_the_distribution_that_transformers_computes() -> None:
    model, most = new_model(), 12
    for parameter in model.parameters():
        parameter.data *= 3  # peaked: a wrong rotation or mask shows
    prompts_PL = torch.randint(4, 17, (GROUPS, 6))
    ids_BL, drawn_BN, lengths_B = Sampler(model, 6 + most)(prompts_PL, most)
    with torch.no_grad():
        logits_BLV = model(input_ids=ids_BL).logits[:, 5:-1]
    expected_BN = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 6:, None])[..., 0]
    counts_BN = torch.arange(most) < lengths_B[:, None]
    assert ((expected_BN - drawn_BN).abs() * counts_BN).max() < 1e-4
    last_B = ids_BL[torch.arange(GROUPS * SAMPLES), 5 + lengths_B]
    assert bool(((last_B == EOS) | (lengths_B == most)).all())


def test_the_plain_loops_gradient_is_that_of_the_mean_over_tokens_then_sequences() -> None:
    """On-policy the clipped loss has the gradient of -A log p, whatever the micro-batches."""
    model, most = new_model(), 6
    prompts_PL = torch.randint(4, 17, (GROUPS, 6))
    sampled = Sampler(model, 6 + most)(prompts_PL, most)
    ids_BL, drawn_BN, lengths_B = (t.clone() for t in sampled)
    advantages_B = torch.randn(GROUPS * SAMPLES)
    update(model, ids_BL, drawn_BN, lengths_B, advantages_B, 6)
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    logp_BN = model(input_ids=ids_BL).logits[:, 5:-1].log_softmax(-1).gather(-1, ids_BL[:, 6:, None])[..., 0]
    counts_BN = torch.arange(most) < lengths_B[:, None]
    mean_B = (logp_BN * counts_BN).sum(1) / lengths_B
    torch.autograd.backward(-(mean_B * advantages_B).mean())
    torch.testing.assert_close(found, model.lm_head.weight.grad, rtol=1e-3, atol=1e-6)


def test_the_meter_counts_the_processor_time_of_children_between_two_moments() -> None:
    burn = "import time\nend = time.time() + 3\nwhile time.time() < end: pass"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    began = time.time()
    process = subprocess.Popen([sys.executable, "-c", outer])
    meter = Meter(process.pid)
    process.wait()
    meter.stop()
    spent = per_step(meter.spent(began + 1.0, began + 2.0), 1)
    total = sum(seconds for seconds, _ in spent.values())
    assert 0.05 < total < 1.1  # the one second, or what a busy machine gave of it
    assert meter.peak_bytes > 1_000_000


@pytest.mark.parametrize(
    ("response", "value"), [("57", 1.0), ("57;123", 1.0), ("5", 0.0), ("571", 0.0), ("", 0.0), (";57", 0.0)]
)
def test_a_response_is_right_up_to_its_first_semicolon(response: str, value: float) -> None:
    assert right("57", response) == value


def test_every_problem_comes_once_in_an_epoch() -> None:
    found = [k for step in order(64, 8, seed=1) for k in step]
    assert sorted(found[:64]) == sorted(found[64:128]) == list(range(64))
