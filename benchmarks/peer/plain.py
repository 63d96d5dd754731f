"""GRPO in a single file and process: what one writes without a framework, and no slower than need be.

    python -m benchmarks.peer.plain WORK.json

Sampling with preallocated caches, fused matrices and prompts taken in once a group; training in rows sorted
by length. B = sequences, P = prompts, L = positions, H = heads, D = head size, V = vocabulary.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch and transformers annotate only a part of what is called here.

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.peer.work import EOS, GROUPS, PAD, SAMPLES, Work, judged, order, rows

CHUNKS = 4  # micro-batches of rows of similar length
CLIP = 0.2


class Sampler:
    """Draws responses at temperature 1 from a Llama; `refresh` after each update."""

    def __init__(self, model: Any, width: int) -> None:
        self.model, c = model, model.config
        self.H, self.D = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        self.eps = c.rms_norm_eps
        inverse = 1.0 / 10000.0 ** (torch.arange(0, self.D, 2) / self.D)
        angles_LD = torch.outer(torch.arange(width), inverse).repeat(1, 2)
        self.cos_LD, self.sin_LD = angles_LD.cos(), angles_LD.sin()
        shape = (c.num_hidden_layers, 2, GROUPS * SAMPLES, self.H, width, self.D)
        self.cache = torch.zeros(shape)
        self.fused: list[tuple[Tensor, Tensor]] = []

    def refresh(self) -> None:
        self.fused = [
            (
                torch.cat([layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight,
                           layer.self_attn.v_proj.weight]),
                torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            )
            for layer in self.model.model.layers
        ]  # fmt: skip

    @torch.inference_mode()
    def __call__(self, prompts_PL: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [B, L + most] padded behind the end, log-probabilities [B, most], lengths [B]."""
        self.refresh()
        P, L = prompts_PL.shape
        B = P * SAMPLES
        logits_BV = self._forward(prompts_PL, 0)[:, -1].repeat_interleave(SAMPLES, 0)
        prefix = self.cache[:, :, :P, :, :L].repeat_interleave(SAMPLES, 2)
        self.cache[:, :, :B, :, :L] = prefix
        ids_BL = torch.full((B, L + most), PAD)
        ids_BL[:, :L] = prompts_PL.repeat_interleave(SAMPLES, 0)
        logprobs_BN, alive_B = torch.zeros(B, most), torch.ones(B, dtype=torch.bool)
        lengths_B = torch.full((B,), most)
        for n in range(most):
            logp_BV = logits_BV.log_softmax(-1)
            drawn_B = torch.multinomial(logp_BV.exp(), 1)[:, 0].where(alive_B, torch.tensor(PAD))
            ids_BL[:, L + n] = drawn_B
            logprobs_BN[:, n] = logp_BV.gather(1, drawn_B[:, None])[:, 0]
            ended_B = alive_B & (drawn_B == EOS)
            lengths_B[ended_B] = n + 1
            alive_B &= ~ended_B
            if n + 1 == most or not alive_B.any():
                break
            logits_BV = self._forward(drawn_B[:, None], L + n)[:, -1]
        return ids_BL, logprobs_BN, lengths_B

    def _forward(self, ids_BL: Tensor, begin: int) -> Tensor:
        """Logits [B, L, V] of tokens at positions from `begin` on; their keys and values into the cache."""
        B, L = ids_BL.shape
        inner, end = self.model.model, begin + L
        x_BLC = inner.embed_tokens(ids_BL)
        for k, layer in enumerate(inner.layers):
            qkv, gate_up = self.fused[k]
            heads = linear(self._norm(x_BLC, layer.input_layernorm), qkv).view(B, L, 3, self.H, self.D)
            q_BHLD, k_BHLD, v_BHLD = heads.permute(2, 0, 3, 1, 4)
            keys, values = self.cache[k, 0, :B], self.cache[k, 1, :B]
            keys[:, :, begin:end] = self._turned(k_BHLD, begin, end)
            values[:, :, begin:end] = v_BHLD
            scores = self._turned(q_BHLD, begin, end) @ keys[:, :, :end].transpose(-1, -2) * self.D**-0.5
            if L > 1:
                scores += torch.full((L, end), -torch.inf).triu(end - L + 1)
            mixed = (scores.softmax(-1) @ values[:, :, :end]).transpose(1, 2).reshape(B, L, -1)
            x_BLC = x_BLC + layer.self_attn.o_proj(mixed)
            gate, up = linear(self._norm(x_BLC, layer.post_attention_layernorm), gate_up).chunk(2, -1)
            x_BLC = x_BLC + layer.mlp.down_proj(silu(gate) * up)
        logits_BLV: Tensor = self.model.lm_head(self._norm(x_BLC[:, -1:], inner.norm))
        return logits_BLV

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, (x.shape[-1],), norm.weight, self.eps)

    def _turned(self, x_BHLD: Tensor, begin: int, end: int) -> Tensor:
        a, b = x_BHLD.chunk(2, -1)
        return x_BHLD * self.cos_LD[begin:end] + torch.cat([-b, a], -1) * self.sin_LD[begin:end]


def update(
    model: Any, ids_BL: Tensor, old_BN: Tensor, lengths_B: Tensor, advantages_B: Tensor, L: int
) -> None:
    """Gradients of the clipped loss, mean over tokens of a sequence, then over sequences."""
    B = len(ids_BL)
    for chosen in lengths_B.argsort(descending=True).chunk(CHUNKS):
        most = int(lengths_B[chosen].max())
        ids = ids_BL[chosen, : L + most]
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=most).logits
        logp = logits.log_softmax(-1).gather(-1, ids[:, L:, None])[..., 0]
        ratio = (logp - old_BN[chosen, :most]).exp()
        advantage = advantages_B[chosen, None]
        each = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        counts = torch.arange(most) < lengths_B[chosen, None]
        torch.autograd.backward(((each * counts).sum(1) / lengths_B[chosen]).sum() / B)


def main(path: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work = Work(**json.loads(Path(path).read_text()))
    torch.manual_seed(work.seed)
    loads: Any = AutoModelForCausalLM
    words: Any = AutoTokenizer.from_pretrained(work.model)
    model = loads.from_pretrained(work.model, dtype=torch.float32)
    model.train(False)
    adamw = torch.optim.AdamW(model.parameters(), lr=work.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    data, limits = rows(work.data), work.limits
    L = len(data[0]["prompt"])
    sampler = Sampler(model, L + limits.max_new_tokens)
    with Path(work.out).open("a", buffering=1) as out:
        for chosen in order(len(data), work.steps, work.seed):
            prompts_PL = torch.tensor([words.encode(data[k]["prompt"]) for k in chosen])
            ids_BL, old_BN, lengths_B = sampler(prompts_PL, limits.max_new_tokens)
            drawn = zip(ids_BL[:, L:].tolist(), lengths_B.tolist(), strict=True)
            said = words.batch_decode([ids[:n] for ids, n in drawn], skip_special_tokens=True)
            asked = [data[k]["answer"] for k in chosen for _ in range(SAMPLES)]
            rewards_B = torch.tensor(judged(asked, said, limits.judge_s))
            grouped = rewards_B.view(GROUPS, SAMPLES)
            advantages_B = ((grouped - grouped.mean(1, True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(
                -1
            )
            update(model, ids_BL.clone(), old_BN.clone(), lengths_B.clone(), advantages_B, L)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
            line = {"time": time.time(), "reward": float(rewards_B.mean()), "tokens": int(lengths_B.sum())}
            print(json.dumps(line), file=out)


if __name__ == "__main__":
    main(sys.argv[1])
