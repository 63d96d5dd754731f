"""A policy as a directory: what is saved loads, what is none is named."""

# pyright: reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch, transformers and safetensors annotate only a part of what is called here.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arriero.components.losses import AIPO
from arriero.components.policy import load_model
from arriero.components.training import TrainState, load_policy
from tests.batches import random_batch
from tests.tiny_models import save_tiny_llama, tiny_llama, tiny_tokenizer
from tests.training_states import GENTLE, gradient_free, state_of, weights_after

torch.set_num_threads(1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_policy_loads_as_the_weights_that_are_sent(tmp_path: Path, tied: bool) -> None:
    state = TrainState(tiny_llama(tied=tied), tiny_tokenizer(), loss=AIPO(), optimizer=GENTLE, steps=1)
    sent = weights_after(state, random_batch([6, 9]))
    state.save(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == sent.keys()
    assert all(torch.equal(stored[name], sent[name]) for name in sent)
    model, tokenizer = load_policy(tmp_path)
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer.encode("12") == tiny_tokenizer().encode("12")
    assert torch.equal(gradient_free(state_of(model)), gradient_free(state))


@pytest.mark.parametrize(
    ("removed", "lacking"),
    [("config.json", "config.json"), ("*.safetensors", "safetensors"), ("tok*", "tokenizer")],
)
def test_a_directory_that_is_no_model_is_named_with_what_it_lacks(
    tmp_path: Path, removed: str, lacking: str
) -> None:
    save_tiny_llama(tmp_path)
    for file in tmp_path.glob(removed):
        file.unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} is not a model directory: .*{lacking}.* missing"):
        load_policy(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        load_policy(tmp_path / "absent")


def test_models_that_threads_load_at_the_same_time_keep_their_heads_tied(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)  # for its tokenizer
    tiny_llama(tied=True).save_pretrained(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        models = [*threads.map(load_model, [tmp_path] * 24)]
    models.append(load_model(tmp_path))  # what the threads left behind
    for model in models:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert head is not None
        assert head.weight is embedding.weight
