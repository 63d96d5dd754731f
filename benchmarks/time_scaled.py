"""Does the runtime deliver LlamaRL's speed-up of 10.7 at 405B? Its published times, a hundred times faster.

    python -m benchmarks.time_scaled [--steps 100] [--scale 100] [--json]

The components of `benchmarks/overlap.py` sleep instead of computing; everything else is real: NATS, one
process for each role, admission, ledger. Three runs:

    in turns        staleness 0, the two stages of the synchronous system      635.8 s a step together
    side by side    staleness 1, the two stages of the asynchronous system      59.5 s each
    without delay   staleness 0, the stages of the asynchronous system         119.0 s together

The first against the second is the published speed-up, the third against the second the part of it that the
one step of delay alone brings: the factor 2 of two equal stages; the rest comes from layouts that only
separate devices allow. How the published times divide over the two stages isn't known to us. In turns only
their sum matters; side by side both are taken to be as long as the step, which leaves the runtime no slack.

Source: LlamaRL, arXiv:2505.24034: 635.8 s and 59.5 s a step on 1,024 H100.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from benchmarks.overlap import WARM_UP, Measured, measure

IN_TURNS_S, SIDE_BY_SIDE_S = 635.8, 59.5
GROUPS = 4
LIMIT = 0.03


def run(name: str, staleness: int, stage_s: float, steps: int) -> Measured:
    """One run with two equal stages; prints its row."""
    found = measure("apart", staleness, stage_s, stage_s, steps + WARM_UP, GROUPS)
    times = f"{found.ideal_ms:>9.1f} ms {found.step_ms:>9.1f} ms {found.ratio - 1:>+7.2%}"
    print(f"{name:>14} {staleness:>9} {times}", flush=True)
    return found


def main() -> int:
    """Exit code 1 if a speed-up is more than 3 % off its ideal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=100, help="of each run, after a few that aren't measured"
    )
    parser.add_argument("--scale", type=float, default=100.0, help="published seconds in one second of sleep")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    print(f"{'':>14} {'staleness':>9} {'ideal step':>12} {'step':>12} {'over':>7}")
    beside = run("side by side", 1, SIDE_BY_SIDE_S / args.scale, args.steps)
    alone = run("without delay", 0, SIDE_BY_SIDE_S / args.scale, args.steps)
    turns = run("in turns", 0, IN_TURNS_S / 2 / args.scale, args.steps)
    worst = 0.0
    for name, slow in (("published speed-up", turns), ("one step of delay", alone)):
        ideal, measured = slow.ideal_ms / beside.ideal_ms, slow.step_ms / beside.step_ms
        worst = max(worst, abs(measured / ideal - 1))
        print(f"{name}: {measured:.2f} x, ideal {ideal:.2f} x ({measured / ideal - 1:+.2%})")
    print(f"worst {worst:.2%}, limit {LIMIT:.0%}; load average {os.getloadavg()[0]:.1f}")
    if args.json:
        runs = [asdict(m) for m in (beside, alone, turns)]
        print(json.dumps({"runs": runs, "worst": worst, "steps": args.steps, "scale": args.scale}))
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
