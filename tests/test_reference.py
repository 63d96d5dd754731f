"""Reference log-probabilities are those of a forward pass over each sample alone."""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from arriero.components.losses import AIPO, DPO, KTO, VMPO, DecoupledPPO, ImportanceWeight, WithKL
from arriero.components.policy import load_policy
from arriero.components.reference import ReferenceLogprobs
from arriero.components.trainer import Trainer
from arriero.engine.errors import UserError
from arriero.schemas.messages import Batch
from tests.batches import random_batch, random_sample
from tests.drive import Alone, kept, outputs, stream
from tests.tiny_models import save_tiny_llama

torch.set_num_threads(1)


async def test_every_trained_token_has_the_logprob_of_the_reference_at_its_temperature(
    tmp_path: Path,
) -> None:
    directory = str(save_tiny_llama(tmp_path))
    batch = random_batch([9, 3, 14], prompt=2, temperature=0.5).model_copy(update={"id": "b0"})
    component = ReferenceLogprobs(model=directory, token_budget=20)
    (found,) = kept(await outputs(component.run(stream([batch], Batch))))
    assert found.parents == ("b0",)
    model, _ = load_policy(directory)
    for sample, before in zip(found.samples, batch.samples, strict=True):
        tokens_L = torch.tensor(sample.tokens.tolist())
        with torch.no_grad():
            logits_LV = model(input_ids=tokens_L[None]).logits[0] / 0.5
        logprobs_L = logits_LV[:-1].log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0].numpy()
        assert sample.reference is not None
        np.testing.assert_allclose(
            sample.reference[1:][sample.mask[1:]], logprobs_L[sample.mask[1:]], atol=1e-5
        )
        assert np.isnan(sample.reference[~sample.mask]).all()
        assert sample.tokens is before.tokens


async def test_a_reference_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    component = ReferenceLogprobs(model=str(save_tiny_llama(tmp_path, vocab_size=12)))
    batch = Batch(samples=(random_sample(9, vocab_size=32),))
    with pytest.raises(UserError, match="but the model's vocabulary ends at 11"):
        await outputs(component.run(stream([batch], Batch)))


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        (Trainer(model="m", loss=WithKL(loss=AIPO(), beta=0.1), steps=1), "put a ReferenceLogprobs before"),
        (Trainer(model="m", loss=DPO(), steps=1), "weighs the pairs of DPO by length; use sequence_mean"),
        (Trainer(model="m", loss=KTO(), steps=1), "weighs the responses of KTO by length"),
        (Trainer(model="m", loss=AIPO(), steps=1, horizon=8), "doesn't read horizon=8"),
        (
            Trainer(model="m", loss=DecoupledPPO(weight=ImportanceWeight()), steps=1),
            "set minibatches or epochs above 1",
        ),
        (Trainer(model="m", loss=VMPO(), steps=1), "set minibatches or epochs above 1"),
    ],
)
def test_what_a_loss_asks_for_and_does_not_get_is_a_problem(trainer: Trainer, problem: str) -> None:
    assert any(problem in line for line in trainer.problems(Alone()))


def test_a_reference_before_the_trainer_is_enough() -> None:
    trainer = Trainer(model="m", loss=WithKL(loss=AIPO(), beta=0.1), steps=1)
    assert not any("Reference" in line for line in trainer.problems(Alone(ReferenceLogprobs(model="m"))))
