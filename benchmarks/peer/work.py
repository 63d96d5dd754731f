"""The same work for all contenders of `benchmarks/peers.py`: model, prompts, lengths, reward.

    prompt "37+85="  ->  response "122;50771..."     16 prompts x 8 samples a step, characters as tokens

A Llama of 4 layers, hidden 128, about a million float32 parameters, first trained on such text, so that its
own end-of-sequence token makes the lengths; every contender samples naturally from the same weights, and no
one is told a length. At the learning rate of the timing runs the weights, and so the lengths, don't move.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch, tokenizers and transformers annotate only a part of what is called here.

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from arriero.schemas.messages import Prompt, Rollout

GROUPS, SAMPLES = 16, 8
CHARACTERS = "0123456789+=;"
PAD, BOS, EOS, UNK = range(4)
VOCABULARY = 32
JUDGE_S = 0.3

Lengths = Literal["uniform", "tailed", "answer"]


@dataclass(frozen=True)
class Load:
    """What a contender is timed on: lengths of responses, seconds the judge takes for a group, the limit."""

    name: str
    lengths: Lengths
    max_new_tokens: int
    judge_s: float = 0.0


LOADS = {
    load.name: load
    for load in (
        Load("uniform", "uniform", 32),
        Load("tailed", "tailed", 100),
        Load("slow", "uniform", 32, judge_s=JUDGE_S),
        Load("learn", "answer", 16),
    )
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One run of one contender: `steps` steps from the model in `model` on the prompts in `data`.

    A line {"time", "reward"} for every step goes to `out`.
    """

    load: str
    model: str
    data: str
    out: str
    steps: int
    lr: float
    seed: int = 0

    @property
    def limits(self) -> Load:
        return LOADS[self.load]


def right(answer: str, response: str) -> float:
    """1 if the response begins with the sum, up to its first semicolon or its end."""
    return float(response.partition(";")[0] == answer)


def graded(prompt: Prompt, rollout: Rollout) -> float:
    """`right` as a reward function of arriero."""
    return right(prompt.answer, rollout.text)


async def graded_slowly(prompt: Prompt, rollout: Rollout) -> float:
    """The same from a judge who takes 0.3 s; all responses of a group are asked at the same time."""
    await asyncio.sleep(JUDGE_S)
    return right(prompt.answer, rollout.text)


def judged(answers: list[str], responses: list[str], judge_s: float) -> list[float]:
    """`right` of a whole batch; every group is a request to a judge, who takes all of them at once."""
    if judge_s:
        with ThreadPoolExecutor(max_workers=GROUPS) as requests:
            list(requests.map(time.sleep, [judge_s] * (len(answers) // SAMPLES)))
    return [right(a, r) for a, r in zip(answers, responses, strict=True)]


def problem(draw: random.Random) -> tuple[str, str]:
    """Prompt and answer: the sum of two numbers of two digits."""
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    return f"{a}+{b}=", str(a + b)


def write_problems(path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    rows = [problem(draw) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))


def rows(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def order(count: int, steps: int, seed: int) -> list[list[int]]:
    """Rows of each step for the loops that choose themselves: epoch after epoch, shuffled."""
    draw, found = random.Random(seed), list[int]()
    while len(found) < steps * GROUPS:
        found += draw.sample(range(count), count)
    return [found[k * GROUPS : (k + 1) * GROUPS] for k in range(steps)]


def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS]
    names += [f"<extra_{k}>" for k in range(VOCABULARY - len(names))]
    made = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def new_model() -> Any:
    """Random weights: 1.06 million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
        tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    llama: Any = LlamaForCausalLM  # its constructor is annotated in some versions only
    model = llama(config)
    model.train(False)
    return model
