"""`arriero plan`: how to split a cluster for a pipeline, and what to change about a run that was made."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from arriero.engine.errors import UserError

if TYPE_CHECKING:
    from arriero.engine.planner.calibrate import Calibration
    from arriero.engine.planner.hardware import Hardware
    from arriero.engine.planner.report import Question
    from arriero.schemas.graph import GraphSpec

USAGE = """\
usage: arriero plan PIPELINE --model MODEL --gpus N [--hardware NAME] [options] [--key value ...]
       arriero plan --from RUN [--json]

MODEL is a directory with config.json or a named size (llama-3.1-8b, -70b, -405b, qwen2.5-1.5b, ...);
NAME is one of a100, h100, h800, h200, b200, h20, cpu. Groups, samples and staleness are the pipeline's keys.

  --gpus N                devices in all
  --hardware NAME         of the trainer, and of the generators unless --generator-hardware names another
  --mean-tokens X         mean response; default: a quarter of sampling.max_new_tokens
  --sigma X               spread of the logarithm of the response length (0.7)
  --prompt-tokens X       mean prompt (200)
  --generate-fp8          generators compute in fp8
  --dispatch even|skew    how a synchronous batch is dealt out (StreamRL)
  --reallocate            search meshes and layouts for each call of a synchronous iteration (ReaL)
  --generating N          this many devices generate, instead of as many as is best
  --calibrate RUN         the hardware at the rate that this run's trainer reached on it
  --plot FILE             draw the step over the split
  --json                  print the plan as JSON"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the command; a pipeline has no keys of these names."""

    config: Path | None = None
    gpus: PositiveInt = 8
    hardware: str = "h100"
    generator_hardware: str = ""
    mean_tokens: NonNegativeFloat = 0.0
    sigma: PositiveFloat = 0.7
    prompt_tokens: PositiveFloat = 200.0
    generate_fp8: bool = False
    dispatch: str = "even"
    reallocate: bool = False
    generating: NonNegativeInt = 0
    calibrate: Path | None = None
    plot: Path | None = None
    json: bool = False


def plan_command(args: list[str]) -> int:
    """Print the answer; the exit code. Raises UserError."""
    print(answer(args))
    return 0


def answer(args: list[str]) -> str:
    """What `arriero plan ARGS` prints. Raises UserError."""
    if not args or {"--help", "-h"} & {*args}:
        return USAGE
    if args[0] == "--from" or args[0].startswith("--from="):
        return _from_run(args)
    if args[0].startswith("-"):
        raise UserError("plan needs a pipeline first: arriero plan PIPELINE --model MODEL --gpus N")
    return _for_pipeline(args)


def _for_pipeline(args: list[str]) -> str:
    from arriero.engine.planner.report import draw, make, text
    from arriero.launchers import catalog
    from arriero.launchers.options import resolve_command

    pipeline = catalog.find(args[0])
    words = args[1:]
    fields = getattr(pipeline.config_type, "__pydantic_fields__", {})
    if "data" in fields and not any(w == "--data" or w.startswith(("--data=", "--data.")) for w in words):
        words = [*words, "--data", "not-read"]  # a plan needs no prompts
    options, config, _ = resolve_command(pipeline.config_type, PlanOptions, words)
    # Unchecked: a named size is no model directory.
    spec = catalog.build(pipeline, config).spec()
    plan = make(spec, _question(spec, options))
    if options.plot is not None:
        draw(plan, options.plot)
    return json.dumps(plan.as_json(), indent=2) if options.json else text(plan)


def _question(spec: GraphSpec, options: PlanOptions) -> Question:
    from arriero.engine.planner.hardware import hardware
    from arriero.engine.planner.models import model
    from arriero.engine.planner.report import Question

    found = [v for n in spec.nodes if isinstance(v := n.config.get("model"), str)]
    if not found:
        raise UserError(f"{spec.name}: no component has a model; a plan is for a pipeline that trains one")
    if options.dispatch not in ("even", "skew"):
        raise UserError(f"--dispatch {options.dispatch}: even or skew")
    device = hardware(options.hardware)
    if options.calibrate is not None:
        device = _as_measured(options.calibrate, device)
    return Question(
        model=model(found[0]), hardware=device, gpus=options.gpus,
        generators=hardware(options.generator_hardware) if options.generator_hardware else None,
        generating=options.generating, mean_tokens=options.mean_tokens, sigma=options.sigma,
        prompt_tokens=options.prompt_tokens, fp8=options.generate_fp8, skew=options.dispatch == "skew",
        reallocate=options.reallocate,
    )  # fmt: skip


def _as_measured(path: Path, device: Hardware) -> Hardware:
    """The device as the trainer of a run reached it, in float32 on a processor."""
    from arriero.engine.planner.calibrate import corrected
    from arriero.engine.planner.models import model

    found = calibration_of(path)
    names = [v for n in found.spec.nodes if isinstance(v := n.config.get("model"), str)]
    if not names:
        raise UserError(f"{path}: no component of the run has a model")
    return corrected(found, device, model(names[0]), "fp32" if device.name == "cpu" else "bf16")


def _from_run(args: list[str]) -> str:
    words = [w for w in args if w != "--json"]
    path = words[0].partition("=")[2] if "=" in words[0] else words[1] if len(words) > 1 else ""
    if not path:
        raise UserError("--from needs a run directory: arriero plan --from RUN")
    found = calibration_of(Path(path))
    return json.dumps(_run_json(found), indent=2) if "--json" in args else run_text(found)


def calibration_of(path: Path) -> Calibration:
    """What a run directory says about its components. Raises UserError if it isn't one or is too short."""
    from arriero.engine.planner.calibrate import calibrate
    from arriero.launchers.rundir import RunDir
    from arriero.schemas.ledger import EVENT

    run = RunDir(path)
    spec = run.read_graph()
    try:
        metrics = [
            cast("dict[str, object]", json.loads(line)) for line in run.metrics.read_text().splitlines()
        ]
        ledger = [EVENT.validate_json(line) for line in run.ledger.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: metrics.jsonl or ledger.jsonl can't be read: {error}") from error
    summary = run.read_summary() if run.summary.exists() else None
    firing_s, record_s = (summary.firing_s, summary.record_s) if summary else ({}, {})
    return calibrate(spec, metrics, ledger, firing_s, record_s)


def run_text(c: Calibration) -> str:
    """Measured against predicted, what holds the run up, and what would change it."""
    from arriero.engine.planner.calibrate import advice, one_more

    trace, least = c.predicted(), c.bound()
    predicted = trace.step_s()
    worth = ", ".join(f"{n} {a.step_s / predicted - 1:+.0%}" for n, a in one_more(c).items())
    busy = ", ".join(f"{n} {t.mean:.3g} s" for n, t in c.times.items() if t.mean > 0.001 * c.step_s)
    lines = [
        f"measured   {c.step_s:.4g} s a step over {c.versions} versions",
        f"predicted  {predicted:.4g} s ({predicted / c.step_s - 1:+.1%}), simulated from {busy or 'nothing'}",
        f"bound      {least.seconds:.4g} s: {' -> '.join(least.nodes)}",
        f"one more   {worth or 'of nothing'}",
        trace.table(),
    ]
    if c.step_s > 1.1 * predicted:
        lines.append("the run is slower than its components: look at idle times and at the machine's load")
    found = advice(c)
    lines += [f"change     {a.change}: {a.step_s:.4g} s ({a.step_s / predicted - 1:+.0%})" for a in found]
    return "\n".join(lines if found else [*lines, "change     nothing simulated makes the step 3 % shorter"])


def _run_json(c: Calibration) -> dict[str, object]:
    from arriero.engine.planner.calibrate import advice, one_more

    trace, least = c.predicted(), c.bound()
    return {
        "measured_step_s": c.step_s, "predicted_step_s": trace.step_s(), "bound_s": least.seconds,
        "bound_cycle": list(least.nodes), "seconds": {n: t.mean for n, t in c.times.items()},
        "idle": trace.idle_share(), "one_more": {n: asdict(a) for n, a in one_more(c).items()},
        "advice": [asdict(a) for a in advice(c)],
    }  # fmt: skip
