"""The forward pass of a policy in training: packed tokens in, log-probabilities of the trained ones out.

    input_ids [B, L] -> decoder -> hidden of the predicting positions [T, H] -> `Head` -> [T], [T]

It is a module of its own, so that what shards parameters sees one forward from the tokens to the result.

Shape suffixes: B = rows, L = positions, T = trained tokens of a micro-batch, H = hidden.
"""

# pyright: reportUnknownMemberType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

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


class PolicyForward(torch.nn.Module):
    """Log-probability and entropy (nats) [T] of the trained tokens of a micro-batch, temperature applied.

    `autocast` is what the decoder computes in. Raises UserError for a model whose log-probabilities would not
    be those of its own forward pass: it is tried on two short sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layout: Layout = "shared_prefix",
        head: Head | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.layout: Layout = layout
        self.head = head or Head()
        self.autocast = autocast
        untyped: Any = model  # what gives its head isn't annotated
        linear: object = untyped.get_output_embeddings()
        if type(linear) is not torch.nn.Linear:
            raise UserError(f"{_name(model)} has a head of {type(linear).__name__}; only a Linear is trained")
        self._linear = [linear]  # in a list: it is a module of `model`, not a second one of this
        if layout != "padded":
            _attend_in_rows(model, layout)
        self._try()

    def forward(self, micro: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """The entropy has a gradient only with `entropy_gradient`."""
        head = replace(self.head, entropy_gradient=entropy_gradient)
        device = micro.input_ids_BL.device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            hidden_TH = self._hidden(micro)
        return head(hidden_TH, self._linear[0], micro.tokens.targets_T, micro.tokens.temperatures_T)

    def _hidden(self, micro: MicroBatch) -> Tensor:
        """What the head reads to predict the trained tokens [T, H]."""
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
        """UserError unless two sequences that begin alike give what the model itself says of each."""
        size = int(self.model.config.vocab_size)
        sequences = [[n % size for n in tokens] for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 5, 4, 3, 2))]
        samples = [_all_trained(s) for s in sequences]
        micro = pack(samples, (0, 1), np.ones(2), layout=self.layout, device=self.model.device)
        found_T, _ = Head()(
            self._hidden(micro), self._linear[0], micro.tokens.targets_T, micro.tokens.temperatures_T
        )
        said: list[Tensor] = []
        for tokens in sequences:
            ids_L = torch.tensor(tokens, device=self.model.device)
            logits_LV: Tensor = self.model(input_ids=ids_L[None], use_cache=False).logits[0]
            said.append(logits_LV[:-1].log_softmax(-1).gather(1, ids_L[1:, None])[:, 0])
        gap = float((found_T - torch.cat(said)).abs().max())
        capped = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None) is not None
        if capped or not gap < _PROBE_TOLERANCE:
            raise UserError(
                f"{_name(self.model)} gives other log-probabilities in layout {self.layout} than by itself "
                f"({gap:.2g} nats); {_remedy(self.layout)}"
            )


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
