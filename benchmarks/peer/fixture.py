"""Makes the models of `benchmarks/peers.py`: supervised training of a few minutes, kept in a folder."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch annotates only a part of what is called here.

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peer.work import EOS, PAD, Lengths, new_model, problem, tokenizer, write_problems

MEDIAN, SIGMA, SHORTEST, LONGEST = 16.0, 0.9, 5, 100  # tokens of a tailed response: 1 to 20
STEPS, LR = 200, 2e-3
ROWS: dict[Lengths, int] = {"uniform": 24, "tailed": 24, "answer": 128}
ACCURACY, MOST_STEPS = 0.45, 4000  # of the model that is to learn


def response(answer: str, lengths: Lengths, draw: random.Random) -> tuple[str, bool]:
    """Text and whether it ends: the sum, then digits up to the length drawn."""
    if lengths == "answer":
        return answer, True
    if lengths == "uniform":
        length, ends = 48, False  # longer than any that is sampled: the model never learns an end
    else:
        length = round(min(LONGEST, max(SHORTEST, draw.lognormvariate(math.log(MEDIAN), SIGMA)))) - 1
        ends = True
    filler = "".join(draw.choices("0123456789", k=max(0, length - len(answer) - 1)))
    return f"{answer};{filler}", ends


def batch(encode: Any, lengths: Lengths, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Token ids and targets [B, L]; -100 where nothing is to be learned."""
    made: list[tuple[list[int], int]] = []
    count = ROWS[lengths]
    for _ in range(count):
        asked, answer = problem(draw)
        text, ends = response(answer, lengths, draw)
        made.append(([*encode(asked), *encode(text), *([EOS] if ends else [])], len(asked)))
    width = max(len(ids) for ids, _ in made)
    ids_BL = torch.full((count, width), PAD)
    targets_BL = torch.full((count, width), -100)
    for row, (ids, prompt) in enumerate(made):
        ids_BL[row, : len(ids)] = torch.tensor(ids)
        targets_BL[row, prompt : len(ids)] = ids_BL[row, prompt : len(ids)]
    return ids_BL, targets_BL


def accuracy(model: Any, encode: Any, decode: Any, draw: random.Random) -> float:
    """Share of right answers among sampled ones."""
    asked = [problem(draw) for _ in range(512)]
    out: Tensor = model.generate(
        torch.tensor([encode(p) for p, _ in asked]), do_sample=True, top_k=0, max_new_tokens=5,
    )  # fmt: skip
    said: list[str] = [decode(row[6:].tolist(), skip_special_tokens=True) for row in out]
    return sum(s == a for s, (_, a) in zip(said, asked, strict=True)) / len(asked)


def make(folder: Path, lengths: Lengths) -> Path:
    """The model directory for `lengths` below `folder`, trained if it isn't there yet."""
    path = folder / lengths
    if (path / "model.safetensors").exists():
        return path
    words, model, draw = tokenizer(), new_model(), random.Random(1)
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    steps = MOST_STEPS if lengths == "answer" else STEPS
    step, loss = 0, torch.zeros(())
    for step in range(steps):
        rate = min(1.0, (step + 1) / 50) * (1.0 if lengths == "answer" else 1 - step / steps)
        adamw.param_groups[0]["lr"] = LR * rate
        ids_BL, targets_BL = batch(words.encode, lengths, draw)
        loss = model(input_ids=ids_BL, labels=targets_BL, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        if lengths == "answer" and step % 50 == 49 and step >= 200:
            reached = accuracy(model, words.encode, words.decode, random.Random(2))
            print(f"fixture {lengths}: step {step + 1}, accuracy {reached:.2f}", flush=True)
            if reached >= ACCURACY:
                break
    print(f"fixture {lengths}: {step + 1} steps, loss {loss.item():.3f}", flush=True)
    for part in (model, words):
        part.save_pretrained(path)
    return path


def problems(folder: Path, count: int, seed: int) -> Path:
    path = folder / f"problems-{count}.jsonl"
    if not path.exists():
        write_problems(path, count, seed)
    return path
