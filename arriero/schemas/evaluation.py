"""What held-out prompts say about one version of a policy."""

from __future__ import annotations

from pydantic import Field, FiniteFloat, NonNegativeInt

from arriero.schemas.messages import Message


class Estimate(Message):
    """A mean over prompts with its 95 % confidence interval."""

    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class EvaluationReport(Message):
    """`source` is a data set, or "" for all together. A rollout without a verdict counts as wrong.

    `pass_at[k]`: the chance that one of k rollouts is right. `avg`: mean reward of a rollout; `length`:
    tokens sampled. `missing`: prompts that gave no scores (too long, say); they are in no mean; if
    there are no others, there is none. Every token was sampled by `version`.
    """

    version: NonNegativeInt
    source: str = ""
    prompts: NonNegativeInt
    missing: NonNegativeInt = 0
    samples: NonNegativeInt
    no_verdict: NonNegativeInt = 0
    truncated: NonNegativeInt = 0
    pass_at: dict[int, Estimate] = Field(default_factory=dict[int, Estimate])
    avg: Estimate | None = None
    length: Estimate | None = None


class Evaluation(Message):
    """`evaluation.json`: what `arriero eval` found out about the weights in a model directory.

    `version` is that of the run the model came from; 0 for any other directory.
    """

    model: str
    weights_sha256: str
    version: NonNegativeInt
    intervals: str
    reports: tuple[EvaluationReport, ...]
