"""Solvers: the best synchronous and the best asynchronous run of a workload on a cluster, by modelled times.

Synchronous: one set of devices generates and trains in turn; weights, states and caches share the memory.
Asynchronous: two sets, each with a layout of its own, bounded by the slower one and by the loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from arriero.engine.errors import UserError
from arriero.engine.planner.costs import Layout, TrainWork, sync_seconds, train_step
from arriero.engine.planner.decoding import Decoder
from arriero.engine.planner.flow import Flow, steady
from arriero.engine.planner.hardware import Hardware
from arriero.engine.planner.memory import (
    cache_slots,
    generate_static,
    resident_tokens,
    train_bytes,
    train_static,
)  # fmt: skip
from arriero.engine.planner.models import ModelShape
from arriero.engine.planner.split import Generation, Split, Training, Workload


def synchronous(
    model: ModelShape,
    hardware: Hardware,
    gpus: int,
    work: Workload,
    *,
    offload: bool = False,
    coupled: bool = False,
) -> Split:
    """The best run in turns on all devices. Raises UserError if nothing fits.

    `offload`: states leave the device while it generates, so that the memory isn't shared; `coupled`: the
    generator has the trainer's tensor parallel size, as where both are one engine.
    """
    found: list[Split] = []
    for training in _trainings(model, hardware, gpus, work, spare=not offload):
        beside = 0.0 if offload else train_static(model, training.layout, work.train)
        for tp in (training.layout.tp * training.layout.pp,) if coupled else _widths(hardware, gpus):
            shared = 0.0 if offload else generate_static(model, tp, work.generate)
            if training.bytes + shared > hardware.memory:
                continue
            if (g := _generation(model, hardware, gpus, work, tp=tp, beside=beside)) is not None:
                move = sync_seconds(
                    model, hardware, senders=gpus, receivers=gpus, replica=tp, precision=work.generate
                )
                step = g.seconds + training.seconds + move + work.score_s
                found.append(Split(training=training, generation=g, step_s=step, staleness=0, sync_s=move))
    found = sorted(found, key=lambda s: s.step_s)[:3]
    exact = [_in_turns(s, work) for s in found]
    if not exact:
        raise UserError(_too_small(model, hardware, gpus))
    return min(exact, key=lambda s: s.step_s)


def asynchronous(
    model: ModelShape, hardware: Hardware, gpus: int, work: Workload, *, staleness: int = 1,
    generators: Hardware | None = None, generating: int | None = None,
) -> Split:  # fmt: skip
    """The best run side by side on `gpus` devices. Raises UserError if nothing fits.

    `generators` is other hardware for generation; `generating` fixes how many devices generate.
    """
    other = generators or hardware
    found: list[Split] = []
    for g_n in [generating] if generating else _counts(gpus, other):
        training = next(_trainings(model, hardware, gpus - g_n, work), None)
        options = [
            _generation(model, other, g_n, work, tp=tp, ahead=staleness + 1) for tp in _widths(other, g_n)
        ]
        generation = min((g for g in options if g), key=lambda g: g.seconds, default=None)
        if training is None or generation is None:
            continue
        sync = sync_seconds(
            model, other, senders=gpus - g_n, receivers=g_n, replica=generation.tp, precision=work.generate
        )
        step = max(training.seconds, generation.seconds)
        found.append(
            Split(training=training, generation=generation, step_s=step, staleness=staleness, sync_s=sync)
        )
    if not found:
        raise UserError(_too_small(model, hardware, gpus))
    best = min(s.step_s for s in found)
    near = [s for s in found if s.step_s < 2 * best]  # unequal lengths and the loop may shift the balance
    exact = [_side_by_side(s, work) for s in near[:: math.ceil(len(near) / 8)]]
    return min(exact, key=lambda s: s.step_s)


def by_split(
    model: ModelShape, hardware: Hardware, gpus: int, work: Workload
) -> list[tuple[int, float, float]]:
    """For a plot: generating devices, seconds of training and of generation."""
    rows: list[tuple[int, float, float]] = []
    for n in _counts(gpus, hardware):
        training = next(_trainings(model, hardware, gpus - n, work), None)
        options = [_generation(model, hardware, n, work, tp=tp) for tp in _widths(hardware, n)]
        seconds = [g.seconds for g in options if g]
        if training and seconds:
            rows.append((n, training.seconds, min(seconds)))
    return rows


def _side_by_side(s: Split, work: Workload) -> Split:
    """The step with unequal lengths and the loop: the flow of one replica."""
    g = s.generation
    flow = Flow(
        decoder=g.decoder, prompt=work.prompt, responses=work.responses, share=_share(work, g.replicas),
        samples=work.samples, drop=True, train_s=s.training.seconds, staleness=s.staleness,
        sync_s=s.sync_s + work.score_s, recompute=True,
    )  # fmt: skip
    result = steady(flow, total=work.sequences)
    return Split(
        training=s.training,
        generation=g,
        step_s=result.step_s,
        staleness=s.staleness,
        sync_s=s.sync_s,
        flow=result,
    )


def _share(work: Workload, replicas: int) -> int:
    """Sequences of a step for one replica: whole groups, at least one."""
    return max(1, round(work.groups / replicas)) * work.samples


def _in_turns(s: Split, work: Workload) -> Split:
    """Generation until the last of the longest, then training."""
    g, share = s.generation, max(1, work.sequences // s.generation.replicas)
    lengths = work.responses.spread(share)
    lengths[-1] = max(lengths[-1], work.responses.expected_longest(work.sequences))
    # A fixed order without luck: every place in turn, the longest in the middle.
    mixed = [*lengths[1::2], *lengths[::2]]
    seconds = g.decoder.makespan([float(v) for v in mixed], work.prompt)
    generation = Generation(tp=g.tp, replicas=g.replicas, slots=g.slots, seconds=seconds, decoder=g.decoder)
    step = seconds + s.training.seconds + s.sync_s + work.score_s
    return Split(training=s.training, generation=generation, step_s=step, staleness=0, sync_s=s.sync_s)


def _sorted_trainings(
    model: ModelShape, hardware: Hardware, gpus: int, work: TrainWork, limit: float
) -> tuple[Training, ...]:
    found: list[Training] = []
    for layout in _layouts(model, hardware, gpus):
        if (size := train_bytes(model, layout, work)) <= limit:
            seconds = train_step(model, hardware, layout, work).total
            micro = min(work.micro_tokens, work.tokens / layout.dp)
            found.append(Training(layout=layout, micro_tokens=micro, seconds=seconds, bytes=size))
    return tuple(sorted(found, key=lambda t: t.seconds))


def _trainings(
    model: ModelShape, hardware: Hardware, gpus: int, work: Workload, *, spare: bool = False
) -> Iterator[Training]:
    """Layouts that fit on `gpus` devices, fastest first; several micro-batch sizes."""
    for size in (1.0, 0.5, 0.25, 0.125) if not spare else (0.5, 0.25, 0.125, 0.0625):
        base = work.work()
        cut = TrainWork(
            tokens=base.tokens, context=base.context, micro_tokens=max(512.0, base.micro_tokens * size),
            precision=base.precision,
        )  # fmt: skip
        if found := _sorted_trainings(model, hardware, gpus, cut, hardware.memory):
            yield from found
            return


def _layouts(model: ModelShape, hardware: Hardware, gpus: int) -> Iterator[Layout]:
    for tp in _powers(min(hardware.node, gpus)):
        for pp in _powers(min(16, model.layers, gpus // tp)):
            if gpus % (tp * pp) == 0:
                dp = gpus // (tp * pp)
                yield Layout(tp=tp, pp=pp, dp=dp, shard="full")
                yield Layout(tp=tp, pp=pp, dp=dp, shard="optimizer")


def _generation(
    model: ModelShape,
    hardware: Hardware,
    gpus: int,
    work: Workload,
    *,
    tp: int,
    beside: float = 0.0,
    ahead: int = 1,
) -> Generation | None:
    """The work of a step on `gpus // tp` replicas that are kept as full as memory and admission allow."""
    replicas = min(gpus // tp, work.sequences)
    if not replicas:
        return None
    tokens = resident_tokens(work.prompt, work.responses)
    fit = cache_slots(model, hardware, tp=tp, precision=work.generate, tokens=tokens, beside=beside)
    slots = min(fit, math.ceil(work.sequences * ahead / replicas))
    if slots < 1:
        return None
    decoder = Decoder(
        model=model, hardware=hardware, tp=tp, precision=work.generate, slots=slots,
        overhead_s=work.overhead_s, sharing=work.samples,
    )  # fmt: skip
    rate = decoder.tokens_per_second(work.prompt, work.responses) * replicas
    seconds = work.sequences * work.responses.mean / rate
    return Generation(tp=tp, replicas=replicas, slots=slots, seconds=seconds, decoder=decoder)


def _widths(hardware: Hardware, gpus: int) -> list[int]:
    return _powers(min(4 * hardware.node, gpus))


def _counts(gpus: int, hardware: Hardware) -> range:
    """Numbers of generating devices worth a look: whole nodes where there are several."""
    unit = hardware.node if gpus >= 4 * hardware.node else 1
    unit = max(unit, gpus // 64)
    return range(unit, gpus, unit)


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(max(1, most).bit_length())]


def _too_small(model: ModelShape, hardware: Hardware, gpus: int) -> str:
    static = 16 * model.params / 1e9
    return (
        f"{model.name} doesn't fit: training alone holds {static:.0f} GB, {gpus} x {hardware.name} have "
        f"{gpus * hardware.memory / 1e9:.0f} GB; use more or larger devices"
    )
