"""The forward pass of a policy in training: packed tokens in, log-probabilities of the trained ones out.

    input_ids [B, L] -> decoder -> hidden of the predicting positions [T, H] -> `Head` -> [T], [T]
                                                                             -> `score` -> [T]

It is a module of its own, so that what shards parameters sees one forward from the tokens to the result. A
teacher's ends with the hidden state: what it would say is compared with what the policy does, in its forward.

Shape suffixes: B = rows, L = positions, T = trained tokens of a micro-batch, H = hidden.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.
# ruff: noqa: N815
# Shapes are suffixes of names, of fields too.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch

from arriero.components.comparing import Taught, divergence
from arriero.components.head import Head
from arriero.components.packing import Layout, MicroBatch, pack
from arriero.components.row_attention import register
from arriero.engine.errors import UserError
from arriero.schemas.messages import Sample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_ATTENTION = {"full_attention", "sliding_attention"}

# Log-probabilities of the same tokens differ by rounding, which grows with depth; a mistake by far more.
_PROBE_TOLERANCE = 1e-3


class Predicted(NamedTuple):
    """Log-probability and entropy in nats, and the divergence from a teacher if there is one, [T] each."""

    logprobs_T: Tensor
    entropy_T: Tensor
    divergence_T: Tensor | None


class PackedForward(torch.nn.Module):
    """A model that reads micro-batches in `layout`; `autocast` is what the decoder computes in.

    `linear` is its head. Raises UserError for a model that would read them otherwise than by itself: it is
    tried on two short sequences.
    """

    reads: ClassVar[str] = "hidden states"

    def __init__(
        self, model: PreTrainedModel, linear: object, *, layout: Layout, autocast: torch.dtype | None
    ) -> None:
        super().__init__()
        self.model = model
        self.layout: Layout = layout
        self.autocast = autocast
        if type(linear) is not torch.nn.Linear:
            raise UserError(f"{_name(model)} has a head of {type(linear).__name__}; only a Linear is trained")
        self._linear = [linear]  # in a list: it is a module of `model`, not a second one of this
        if layout != "padded":
            _attend_in_rows(model, layout)
        self._try()

    @property
    def linear(self) -> torch.nn.Linear:
        return self._linear[0]

    def read(self, micro: MicroBatch) -> Tensor:
        """What the head reads to predict the trained tokens [T, H]."""
        device = micro.input_ids_BL.device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            return self._hidden(micro)

    def _hidden(self, micro: MicroBatch) -> Tensor:
        arguments: dict[str, Any] = {"position_ids": micro.position_ids_BL, "use_cache": False}
        if micro.rows is not None:
            # A finished mask, which attention in rows doesn't read, saves transformers one of [N, N].
            finished = torch.zeros(1, 1, 1, 1, device=micro.input_ids_BL.device)
            arguments |= {"rows": micro.rows, "attention_mask": finished}
        decoder: Any = self.model.base_model
        hidden_BLH: Tensor = decoder(input_ids=micro.input_ids_BL, **arguments).last_hidden_state
        return hidden_BLH.flatten(0, 1).index_select(0, micro.index_T)

    @torch.no_grad()
    def _try(self) -> None:
        """UserError unless two sequences that begin alike give what the model itself makes of each."""
        size = int(self.model.config.vocab_size)
        sequences = [[n % size for n in tokens] for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 5, 4, 3, 2))]
        samples = [_all_trained(s) for s in sequences]
        micro = pack(samples, (0, 1), np.ones(2), layout=self.layout, device=self.model.device)
        gap = self._gap(micro, [torch.tensor(tokens, device=self.model.device) for tokens in sequences])
        if not gap < _PROBE_TOLERANCE:
            raise UserError(
                f"{_name(self.model)} gives other {self.reads} in layout {self.layout} than by itself "
                f"({gap:.2g} apart); {_remedy(self.layout)}"
            )

    def _gap(self, micro: MicroBatch, sequences: Sequence[Tensor]) -> float:
        """How far apart what `micro` reads is from the sequences alone, all but the first token trained."""
        decoder: Any = self.model.base_model
        alone: list[Tensor] = [
            decoder(input_ids=ids_L[None], use_cache=False).last_hidden_state[0, :-1] for ids_L in sequences
        ]
        said = torch.cat(alone)
        return float((self._hidden(micro) - said).abs().max() / said.abs().max().clamp_min(1.0))


class TokenForward(PackedForward):
    """Of a model whose head says which token comes next."""

    reads: ClassVar[str] = "log-probabilities"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: Layout = "shared_prefix",
        head: Head | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        untyped: Any = model  # what gives its head isn't annotated
        super().__init__(model, untyped.get_output_embeddings(), layout=layout, autocast=autocast)
        self.head = head or Head()

    def _gap(self, micro: MicroBatch, sequences: Sequence[Tensor]) -> float:
        """In nats; without end for a head that doesn't end with its matrix."""
        if getattr(self.model.config.get_text_config(), "final_logit_softcapping", None) is not None:
            return math.inf
        tokens = micro.tokens
        found_T, _ = Head()(self._hidden(micro), self.linear, tokens.targets_T, tokens.temperatures_T)
        said: list[Tensor] = []
        for ids_L in sequences:
            logits_LV: Tensor = self.model(input_ids=ids_L[None], use_cache=False).logits[0]
            said.append(logits_LV[:-1].log_softmax(-1).gather(1, ids_L[1:, None])[:, 0])
        return float((found_T - torch.cat(said)).abs().max())


class PolicyForward(TokenForward):
    """What a policy says of the trained tokens of a micro-batch, temperature applied."""

    def forward(
        self, micro: MicroBatch, *, entropy_gradient: bool = False, taught: Taught | None = None
    ) -> Predicted:
        """The entropy has a gradient only with `entropy_gradient`; a divergence is of what was `taught`."""
        head = replace(self.head, entropy_gradient=entropy_gradient)
        hidden_TH = self.read(micro)
        targets_T, temperatures_T = micro.tokens.targets_T, micro.tokens.temperatures_T
        logprobs_T, entropy_T = head(hidden_TH, self.linear, targets_T, temperatures_T)
        apart_T = None
        if taught is not None:
            apart_T = divergence(head, hidden_TH, self.linear, temperatures_T, taught)
        return Predicted(logprobs_T, entropy_T, apart_T)


class TeacherForward(TokenForward):
    """What a teacher reads of a micro-batch [T, H], without gradient: the input of its `linear`."""

    @torch.no_grad()
    def forward(self, micro: MicroBatch) -> Tensor:
        return self.read(micro)


class ScoreForward(PackedForward):
    """The number [T], float32, that a model with a head `score` gives in front of each trained token."""

    def __init__(
        self, model: PreTrainedModel, *, layout: Layout = "padded", autocast: torch.dtype | None = None
    ) -> None:
        super().__init__(model, getattr(model, "score", None), layout=layout, autocast=autocast)

    def forward(self, micro: MicroBatch) -> Tensor:
        hidden_TH = self.read(micro)
        score_T1: Tensor = self.linear(hidden_TH.to(self.linear.weight.dtype))
        return score_T1[:, 0].float()


def _attend_in_rows(model: PreTrainedModel, layout: Layout) -> None:
    """Make `model` attend in rows; UserError if it can't."""
    config: Any = model.config.get_text_config()
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    name = register()
    if not other:
        model.set_attn_implementation(name)
    if other or config._attn_implementation != name:
        what = f"layers of {', '.join(other)}" if other else "an attention of its own"
        raise UserError(f"{_name(model)} has {what}, which layout {layout} can't split; {_remedy(layout)}")


def _remedy(layout: Layout) -> str:
    if layout == "padded":
        return "what it does to its logits isn't supported"
    return "set packing to padded"


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


def _all_trained(tokens: list[int]) -> Sample:
    """Every token but the first is trained on."""
    return Sample(
        group="", tokens=np.array(tokens, np.int32), mask=np.arange(len(tokens)) > 0,
        advantages=np.zeros(len(tokens), np.float32),
    )  # fmt: skip
