"""Some rollouts of a recorded run as HTML, token by token: log-probability, version, advantage.

What a model has written is hostile: every text is escaped, nothing of it becomes an attribute or an address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from arriero.schemas.messages import Rollout, Score, ScoredGroup

if TYPE_CHECKING:
    from arriero.engine.lineage.reader import Lineage
    from arriero.schemas.ledger import Trained

_STEPS, _GROUPS, _EACH = 4, 2, 3  # steps of the run, groups of each, rollouts of each
_MOST_TOKENS, _MOST_TEXT = 1500, 6000
Pieces = Callable[[Sequence[int]], list[str]]

STYLE = "".join(
    [
        *(f"#by-p:checked~main .p{k}{{background:rgba(197,48,48,{k * 0.11:.2f})}}" for k in range(1, 8)),
        *(f"#by-v:checked~main .v{k}{{background:rgba(107,70,193,{0.08 + k * 0.11:.2f})}}" for k in range(8)),
        *(f"#by-a:checked~main .a{k}{{background:rgba(47,133,90,{k * 0.14:.2f})}}" for k in range(1, 6)),
        *(f"#by-a:checked~main .b{k}{{background:rgba(197,48,48,{k * 0.14:.2f})}}" for k in range(1, 6)),
    ]
)
CHOICES = (
    '<span class="note">colour tokens by</span>'
    '<input type="radio" name="by" id="by-p" checked>'
    '<label for="by-p">log-probability (red: unlikely)</label>'
    '<input type="radio" name="by" id="by-v"><label for="by-v">version (deep: stale)</label>'
    '<input type="radio" name="by" id="by-a"><label for="by-a">advantage (green: more of this)</label>'
)


def rollouts_html(record: Lineage, tokenizer: Path | None) -> str:
    """The best, the worst and another response of groups at the begin, the end and between."""
    pieces = pieces_of(tokenizer)
    chosen = _spread(record.steps, _STEPS)
    parts: list[str] = []
    for step in chosen:
        batch = record.batches.get(step.batch)
        names = [g for g in (batch.groups if batch else ()) if g in record.groups]
        advantages = _advantages(record, step)
        parts += [
            group_html(group, step, advantages, pieces)
            for name in names[:_GROUPS]
            if name not in record.redacted and isinstance(group := record.group(name), ScoredGroup)
        ]
    return "\n".join(parts)


def _advantages(record: Lineage, step: Trained) -> dict[bytes, float]:
    """Mean advantage of a sample by its tokens; nothing where the batch can't be put together."""
    if step.batch not in record.batches or step.batch in record.redacted:
        return {}
    samples = record.batch(step.batch).samples
    return {s.tokens.tobytes(): float(s.advantages[s.mask].mean()) for s in samples if s.mask.any()}


def group_html(
    group: ScoredGroup, step: Trained, advantages: dict[bytes, float], pieces: Pieces | None
) -> str:
    """The prompt and some responses of a group that `step` was trained on."""
    pairs = sorted(
        zip(group.group.rollouts, group.scores, strict=True), key=lambda pair: pair[1].value, reverse=True
    )
    shown = pairs if len(pairs) <= _EACH else [pairs[0], pairs[len(pairs) // 2], pairs[-1]]
    prompt = group.group.prompt
    head = f"version {step.version}, row {prompt.row}, epoch {prompt.epoch}: "
    head += ", ".join(f"{score.value:.3g}" for _, score in pairs[:16])
    answer = f'<p class="note">answer: {_cut(prompt.answer)}</p>' if prompt.answer else ""
    body = "".join(_rollout(r, s, step, advantages.get(r.tokens.tobytes()), pieces) for r, s in shown)
    return (
        f"<details><summary>{escape(head)}</summary>"
        f'<pre class="prompt">{_cut(prompt.text)}</pre>{answer}{body}</details>'
    )


def _rollout(
    rollout: Rollout, score: Score, step: Trained, advantage: float | None, pieces: Pieces | None
) -> str:
    told = f"reward {score.value:.4g} ({score.outcome}), {int(rollout.mask.sum())} tokens, {rollout.finish}"
    told += f", of its turns {', '.join(f'{t:.4g}' for t in score.turns)}" if score.turns else ""
    told += f", advantage {advantage:.3g}" if advantage is not None else ""
    detail = f" {_cut(score.detail, 300)}" if score.detail else ""
    text = _cut(rollout.text) if pieces is None else _tokens(rollout, step, advantage, pieces)
    return f'<p class="note">{escape(told)}{detail}</p><pre>{text}</pre>'


def _tokens(rollout: Rollout, step: Trained, advantage: float | None, pieces: Pieces) -> str:
    """A span per sampled token; its classes are numbers of ours, its title what they stand for."""
    at = np.flatnonzero(rollout.mask)[:_MOST_TOKENS]
    texts = pieces([int(rollout.tokens[k]) for k in at])
    spans: list[str] = []
    for k, text in zip(at, texts, strict=True):
        logprob, version = float(rollout.logprobs[k]), int(rollout.versions[k])
        title = f"log-prob {logprob:.3f}, version {version}"
        kind = token_class(logprob=logprob, age=step.version - 1 - version, advantage=advantage)
        spans.append(f'<span class="{kind}" title="{title}">{escape(text)}</span>')
    left = int(rollout.mask.sum()) - len(at)
    return "".join(spans) + (f" … {left} more tokens" if left else "")


def token_class(*, logprob: float, age: int, advantage: float | None) -> str:
    """The classes of `STYLE` for a token that was sampled `age` versions ago; log-probability in nats."""
    return f"p{_level(-logprob, 7)} v{min(max(age, 0), 7)} {_side(advantage)}"


def _level(value: float, most: int) -> int:
    return min(most, max(0, math.ceil(value))) if math.isfinite(value) else most


def _side(advantage: float | None) -> str:
    if not advantage or not math.isfinite(advantage):
        return "a0"
    return f"{'a' if advantage > 0 else 'b'}{min(5, math.ceil(2 * abs(advantage)))}"


def _cut(text: str, most: int = _MOST_TEXT) -> str:
    return escape(text[:most]) + (f" … {len(text) - most} more characters" if len(text) > most else "")


def pieces_of(tokenizer: Path | None) -> Pieces | None:
    """Token ids as text, one by one; None without a tokenizer."""
    if tokenizer is None:
        return None
    from tokenizers import Tokenizer

    read = Tokenizer.from_file(str(tokenizer))
    return lambda ids: [read.decode([i], skip_special_tokens=False) or "·" for i in ids]


def _spread(steps: Sequence[Trained], count: int) -> list[Trained]:
    """The first, the last and some between, as evenly as can be."""
    if len(steps) <= count:
        return [*steps]
    return [steps[round(k * (len(steps) - 1) / (count - 1))] for k in range(count)]
