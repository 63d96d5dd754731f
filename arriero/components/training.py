"""One optimizer step on one batch, on any number of ranks; no runtime, no event loop.

    batch (the same on every rank) -> this rank's micro-batches -> sum of w_t * l_t, backward
          -> gradients and measures summed over ranks -> clip -> AdamW -> version + 1

Shape suffixes: B = rows, L = positions, V = vocabulary, T = trained tokens of a micro-batch.
A step is all or nothing: what can be wrong with a batch, a loss or a gradient raises before the weights move.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from arriero.components.losses import Aggregation, Loss, sequence_weights
from arriero.components.measures import Measures
from arriero.components.optimizer import AdamW
from arriero.components.packing import Layout, MicroBatch, check_samples, forward_length, pack, plan

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from arriero.schemas.messages import Batch, Sample

Precision = Literal["float32", "bfloat16"]
_BUCKET_BYTES = 64 << 20


def load_policy(
    path: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (in evaluation mode: no dropout) and tokenizer from a Hugging Face model directory.

    Reads safetensors only and runs no code of the directory. ValueError, naming the directory and what it
    lacks, if it isn't one.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a model directory: no such directory")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is not a model directory: config.json is missing")
    if not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} is not a model directory: *.safetensors is missing (other formats aren't read)"
        )
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(
            f"{directory} is not a model directory: tokenizer.json and tokenizer_config.json are missing"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    tokenizer = cast(  # from_pretrained of AutoTokenizer has no annotations
        "PreTrainedTokenizerBase",
        AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True),
    )
    torch.nn.Module.to(model, device)  # the wrapper of transformers hides its signature
    return model, tokenizer


def token_logprobs(model: PreTrainedModel, micro: MicroBatch, *, keeps_logits: bool) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy (nats, no gradient) [T] of the trained tokens, temperature applied.

    `keeps_logits`: whether the model's forward takes `logits_to_keep`; otherwise all logits are made.
    """
    arguments = {"input_ids": micro.input_ids_BL, "position_ids": micro.position_ids_BL, "use_cache": False}
    if keeps_logits:
        logits_BKV = model(**arguments, logits_to_keep=micro.keep).logits
    else:
        keep = slice(-micro.keep, None) if isinstance(micro.keep, int) else micro.keep
        logits_BKV = model(**arguments).logits[:, keep]
    logits_TV = logits_BKV.flatten(0, 1)
    tokens = micro.tokens
    if len(micro.index_T) < len(logits_TV):
        logits_TV = logits_TV.index_select(0, micro.index_T)
    distribution_TV = (logits_TV.float() / tokens.temperatures_T[:, None]).log_softmax(-1)
    logprobs_T = distribution_TV.gather(1, tokens.targets_T[:, None])[:, 0]
    with torch.no_grad():
        entropy_T = -(distribution_TV.exp() * distribution_TV).sum(-1)
    return logprobs_T, entropy_T


class TrainState:
    """A policy in training: `version` is the number of optimizer steps that made its weights.

    With a process `group` every rank calls `step` with the same batch, trains its share of it and ends with
    the same weights. Parameters are float32; `precision` is what the forward pass computes in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        loss: Loss,
        optimizer: AdamW,
        steps: int,
        token_budget: int = 8192,
        aggregation: Aggregation = "token_mean",
        horizon: float = 0,
        layout: Layout = "padded",
        precision: Precision = "float32",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        half = sorted({str(p.dtype) for p in model.parameters() if p.dtype.itemsize < 4})
        if half:
            raise TypeError(
                f"parameters are {half}: small updates vanish; load float32 and set precision='bfloat16'"
            )
        self.model = model
        model.train(False)  # dropout would make the policy another one than the generator's
        self.tokenizer = tokenizer
        self.loss = loss
        self.optimizer = optimizer
        self.steps = steps
        self.version = 0
        self._cut: tuple[int, Layout] = (token_budget, layout)
        self._aggregation: tuple[Aggregation, float] = (aggregation, horizon)
        self._precision = precision
        self._group = group
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._adamw = torch.optim.AdamW(
            self._parameters.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch) -> dict[str, float]:
        """Train on `batch` once; measures of the step, the same on every rank.

        ValueError for a batch that can't be trained on, FloatingPointError for a loss or gradient that isn't
        finite; the weights are then as before.
        """
        micros = self.micro_batches(batch)
        measures = Measures(self.model.device, off_policy=all(s.logprobs is not None for s in batch.samples))
        for p in self._parameters.values():
            p.grad = None
        for micro in micros:
            with torch.autocast(
                self.model.device.type, torch.bfloat16, enabled=self._precision == "bfloat16"
            ):
                logprobs_T, entropy_T = token_logprobs(self.model, micro, keeps_logits=self._keeps_logits)
            loss = self._weighted(logprobs_T, micro)
            torch.autograd.backward(loss)
            with torch.no_grad():
                measures.add(
                    loss, logprobs_T, entropy_T, micro.tokens, self.loss.clipped(logprobs_T, micro.tokens)
                )
        metrics = measures.totals(self._group, digest=_digest(batch.samples))
        metrics |= self._update(metrics["loss"])
        if measures.off_policy:
            metrics["reward"] = float(np.mean([s.reward for s in batch.samples]))
        return metrics

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        """This rank's share of `batch`, on its device; ValueError if the batch can't be trained on."""
        samples = batch.samples
        check_samples(samples, context=getattr(self.model.config, "max_position_embeddings", None))
        if self.loss.needs_behaviour and (bare := sorted({s.group for s in samples if s.logprobs is None})):
            raise ValueError(
                f"{type(self.loss).__name__} needs log-probabilities; the samples of {bare} have none"
            )
        aggregation, horizon = self._aggregation
        counts = np.array([s.mask.sum() for s in samples], dtype=np.int64)
        weights = sequence_weights(counts, aggregation, horizon=horizon)
        token_budget, layout = self._cut
        ranks, rank = (1, 0) if self._group is None else (self._group.size(), self._group.rank())
        shares = plan(
            [forward_length(s) for s in samples], token_budget=token_budget, ranks=ranks, layout=layout
        )
        return [pack(samples, m, weights, layout=layout, device=self.model.device) for m in shares[rank]]

    def state_dict_for_weights(self) -> dict[str, Tensor]:
        """Name -> tensor of the policy: what `save` writes, a tensor that several names share once."""
        tensors: dict[str, Tensor] = {}
        seen: set[tuple[int, tuple[int, ...]]] = set()
        named = {name for name, _ in self.model.named_parameters()}  # without second names
        state: dict[str, Tensor] = self.model.state_dict()
        for name in sorted(state, key=lambda n: n not in named):
            tensor = state[name]
            key = (tensor.data_ptr(), tuple(tensor.shape))
            if key not in seen:
                seen.add(key)
                tensors[name] = tensor
        return tensors

    def save(self, directory: Path) -> None:
        """Write safetensors, config and tokenizer as `load_policy` reads them; call it on one rank."""
        self.model.save_pretrained(directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def checkpoint(self) -> dict[str, Tensor]:
        """Everything `restore` needs to go on bit for bit, as live tensors: weights, moments, version."""
        tensors = {f"model.{name}": t for name, t in self.state_dict_for_weights().items()}
        for name, parameter in self._parameters.items():
            moments: Mapping[str, Tensor] = self._adamw.state.get(parameter, {})
            tensors |= {f"{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments}
        return tensors | {"version": torch.tensor(self.version)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `checkpoint` gave; ValueError naming the tensors that are missing."""
        own = self.checkpoint().keys() - {
            f"{k}.{n}" for n in self._parameters for k in ("exp_avg", "exp_avg_sq")
        }
        version = int(tensors["version"]) if "version" in tensors else 0
        if version > 0:
            own |= {f"{k}.{n}" for n in self._parameters for k in ("exp_avg", "exp_avg_sq")}
        if missing := sorted(own - tensors.keys()):
            raise ValueError(f"the checkpoint lacks {len(missing)} of {len(own)} tensors: {missing[:3]}")
        with torch.no_grad():
            for name, tensor in self.state_dict_for_weights().items():
                tensor.copy_(tensors[f"model.{name}"])
        self._adamw.state.clear()
        for name, p in self._parameters.items() if version > 0 else ():
            moments = {k: tensors[f"{k}.{name}"].to(p.device, copy=True) for k in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[p] = {"step": torch.tensor(float(version), device=p.device), **moments}
        self.version = version

    def _weighted(self, logprobs_T: Tensor, micro: MicroBatch) -> Tensor:
        losses_T = self.loss(logprobs_T, micro.tokens)
        if losses_T.shape != logprobs_T.shape:
            raise TypeError(
                f"{type(self.loss).__name__} gave {tuple(losses_T.shape)} for {len(logprobs_T)} tokens: "
                "a loss is per token, aggregation is apart"
            )
        return (losses_T * micro.tokens.weights_T).sum()

    def _update(self, loss: float) -> dict[str, float]:
        """Sum, check and clip the gradients, take the optimizer step."""
        for p in self._parameters.values():
            if p.grad is None:  # unused here: decayed all the same, as on a rank that did use it
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        if self._group is not None:
            _sum_over_ranks(gradients, self._group)
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise FloatingPointError(
                f"step {self.version}: loss {loss}, gradient norm {grad_norm}; weights unchanged"
            )
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self.optimizer.max_grad_norm, norm)
        rate = self.optimizer.learning_rate(self.version, steps=self.steps)
        for parameters in self._adamw.param_groups:
            parameters["lr"] = rate
        self._adamw.step()
        self.version += 1
        return {"grad_norm": grad_norm, "lr": rate}


def _sum_over_ranks(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """In place, in buckets of equal dtype, so that many small tensors cost one exchange."""
    bucket: list[Tensor] = []

    def flush() -> None:
        flat = torch.cat([g.flatten() for g in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
        bucket.clear()

    for gradient in gradients:
        if bucket and (
            gradient.dtype != bucket[0].dtype
            or sum(g.nbytes for g in bucket) + gradient.nbytes > _BUCKET_BYTES
        ):
            flush()
        bucket.append(gradient)
    if bucket:
        flush()


def _digest(samples: Iterable[Sample]) -> int:
    """CRC-32 of the tokens, to notice ranks that were given different batches."""
    digest = 0
    for s in samples:
        digest = zlib.crc32(s.tokens.tobytes(), digest)
    return digest
