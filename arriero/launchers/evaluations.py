"""Held-out results, from the ledger to numbers: pass@k, mean reward and length, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

from arriero.schemas.evaluation import Estimate, EvaluationReport
from arriero.schemas.ledger import Admitted, DroppedEvent, Evaluated, Event
from arriero.schemas.messages import Outcome

_Z = NormalDist().inv_cdf(0.975)
VERDICTS = (Outcome.OK, Outcome.WRONG)
INTERVALS = (
    "95 %: Wilson with the effective number of rollouts for pass@k, normal over prompts for the others"
)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that k of `samples` rollouts, drawn without replacement, hold one of the `right` ones.

    The unbiased estimator of pass@k: Chen et al., arXiv:2107.03374, section 2.1.
    """
    if not 0 < k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} rollouts, {right} of them right, isn't defined")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def share_estimate(shares: Sequence[float], samples: int) -> Estimate:
    """The mean of one share in [0, 1] per prompt, of `samples` rollouts in all, with Wilson's interval.

    Rollouts of one prompt aren't independent: Wilson's interval (JASA 1927) is taken for the number of
    independent rollouts that would scatter as the prompts do (Korn and Graubard, Survey Methodology 1998), at
    least one per prompt and at most `samples`.
    """
    mean, n = fmean(shares), float(len(shares))
    scatter = variance(shares) / len(shares) if len(shares) > 1 else 0.0
    if scatter > 0.0:
        n = min(max(mean * (1 - mean) / scatter, n), float(samples))
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return Estimate(
        value=mean, low=max(0.0, min(mean, centre - half)), high=min(1.0, max(mean, centre + half))
    )


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean of one number per prompt, with the normal interval of its standard error."""
    mean = fmean(values)
    half = _Z * math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0
    return Estimate(value=mean, low=mean - half, high=mean + half)


class Evaluations:
    """The held-out prompts of each version: which were sent, and what came back."""

    def __init__(self) -> None:
        self._sent: dict[int, Admitted] = {}  # prompts under way, by origin
        self._missing: Counter[tuple[int, str]] = Counter()  # by version and data set
        self._back: defaultdict[int, list[Evaluated]] = defaultdict(list)

    def event(self, event: Event) -> None:
        """Take an event into account."""
        match event:
            case Admitted() if event.split == "eval":
                self._sent[event.origin] = event
            case Evaluated():
                self._sent.pop(event.origin, None)
                self._back[event.version].append(event)
            case DroppedEvent():
                for lost in [self._sent.pop(o) for o in event.origins if o in self._sent]:
                    self._missing[lost.min_version, lost.source] += 1
            case _:
                pass

    @property
    def versions(self) -> list[int]:
        """Those of which something came back or is known to be missing, ascending."""
        return sorted({*self._back, *(version for version, _ in self._missing)})

    def newest(self) -> dict[str, float | int | None]:
        """For a line of metrics: the newest version of which something came back, as far as it has."""
        if not self._back:
            return {}
        r = self.report(max(self._back))[0]
        return {
            "version": r.version, "prompts": r.prompts, "pass@1": r.pass_at[1].value,
            "avg": r.avg.value if r.avg else None, "length": r.length.value if r.length else None,
        }  # fmt: skip

    def report(self, version: int) -> list[EvaluationReport]:
        """All data sets together, then each one if there are several; empty if nothing was sent."""
        back = self._back.get(version, [])
        missing = {s: n for (v, s), n in self._missing.items() if v == version}
        sources = sorted({e.source for e in back} | {*missing})
        whole = [_report(back, version, "", sum(missing.values()))] if sources else []
        each = [_report([e for e in back if e.source == s], version, s, missing.get(s, 0)) for s in sources]
        return [*whole, *(each if len(each) > 1 else [])]


def _report(back: Sequence[Evaluated], version: int, source: str, missing: int) -> EvaluationReport:
    if not back:
        return EvaluationReport(version=version, source=source, prompts=0, missing=missing, samples=0)
    right = [(len(e.outcomes), e.outcomes.count(Outcome.OK)) for e in back]
    samples, fewest = sum(n for n, _ in right), min(n for n, _ in right)
    lengths = [fmean(e.lengths) for e in back if e.lengths]
    ks = [k for k in (*(2**i for i in range(20)), fewest) if k <= fewest]
    return EvaluationReport(
        version=version, source=source, prompts=len(back), missing=missing, samples=samples,
        no_verdict=sum(o not in VERDICTS for e in back for o in e.outcomes),
        truncated=sum(e.truncated for e in back),
        pass_at={
            k: share_estimate([pass_at_k(n, c, k) for n, c in right], samples) for k in sorted({*ks})
        },
        avg=mean_estimate([fmean(e.values) for e in back]),
        length=mean_estimate(lengths) if lengths else None,
    )  # fmt: skip


def evaluation_table(reports: Sequence[EvaluationReport]) -> str:
    """One line per version and data set."""
    heads = ("version", "data", "prompts", "rollouts", "pass@1", "pass@k", "reward", "tokens", "missing")
    rows: list[tuple[str, ...]] = [heads]
    for r in reports:
        k = max(r.pass_at, default=0)
        most = f"{k}: {r.pass_at[k].value:.1%}" if k > 1 else "-"
        rows.append(
            (str(r.version), r.source or "all", str(r.prompts), str(r.samples),
             shown(r.pass_at.get(1), "{:.1%}"), most, shown(r.avg, "{:.3f}"), shown(r.length, "{:.0f}"),
             str(r.missing))
        )  # fmt: skip
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def shown(estimate: Estimate | None, form: str) -> str:
    """`52.1% [49.0%, 55.2%]`; `-` for none."""
    if estimate is None:
        return "-"
    return f"{form.format(estimate.value)} [{form.format(estimate.low)}, {form.format(estimate.high)}]"
