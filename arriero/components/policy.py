"""A policy as a model: read from a directory, and its log-probabilities of trained tokens.

Shape suffixes: T = trained tokens of a micro-batch.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch

from arriero.components.model_directory import check_model_directory, loading
from arriero.components.packing import check_samples, pack, plan, read
from arriero.engine.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from arriero.components.forward import PolicyForward
    from arriero.schemas.messages import Sample


def load_policy(
    path: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (in evaluation mode: no dropout) and tokenizer from a Hugging Face model directory.

    Reads safetensors only and runs no code of the directory. UserError, naming the directory and what is
    wrong with it, if it isn't one or can't be loaded.
    """
    return load_model(path, device=device, dtype=dtype), load_tokenizer(path)


def load_model(
    path: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model alone, as `load_policy` reads it."""
    directory = check_directory(path)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with loading(directory):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    torch.nn.Module.to(model, device)  # the wrapper of transformers hides its signature
    return model


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer alone, as `load_policy` reads it."""
    directory = check_directory(path)
    from transformers import AutoTokenizer

    with loading(directory):
        return cast(  # from_pretrained of AutoTokenizer has no annotations
            "PreTrainedTokenizerBase",
            AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True),
        )


def said(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """What sampled tokens say: the `text` of a rollout, and what an environment hears of a turn."""
    untyped: Any = tokenizer  # `decode` is annotated in part
    return str(untyped.decode(ids, skip_special_tokens=True))


def check_directory(path: Path | str) -> Path:
    """The directory; UserError, naming it and what it lacks, if it isn't a model directory."""
    for problem in check_model_directory(str(path)):
        raise UserError(problem)
    return Path(path)


def save_description(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write what a model directory holds beside the weights."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    generation: object = getattr(model, "generation_config", None)  # a model that scores has none
    described: list[Any] = [config, generation, tokenizer]  # `save_pretrained` is partly untyped
    for part in described:
        if part is not None:
            part.save_pretrained(directory)


def sample_logprobs(
    forward: PolicyForward, samples: Sequence[Sample], *, token_budget: int
) -> list[npt.NDArray[np.float32]]:
    """Log-probabilities of each sample's trained tokens, in micro-batches of up to `token_budget` tokens.

    ValueError for a sample that the model can't read, UserError for a vocabulary too small for its tokens.
    """
    config = forward.model.config
    check_samples(
        samples, context=getattr(config, "max_position_embeddings", None), vocabulary=int(config.vocab_size)
    )
    found = [np.zeros(0, np.float32)] * len(samples)
    (micros,) = plan([read(s) for s in samples], token_budget=token_budget, layout=forward.layout)
    for indices in micros:
        micro = pack(
            samples, indices, np.ones(len(samples)), layout=forward.layout, device=forward.model.device
        )
        with torch.no_grad():
            logprobs_T, _, _ = forward(micro)
        ends = np.cumsum([int(samples[i].mask.sum()) for i in indices])[:-1]
        for i, values in zip(indices, np.split(logprobs_T.cpu().numpy(), ends), strict=True):
            found[i] = values
    return found
