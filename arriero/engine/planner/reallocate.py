"""One synchronous iteration as calls for the plan search: generation, a reference model, training."""

from __future__ import annotations

import math
from collections.abc import Callable

from arriero.engine.planner.costs import Layout, forward_pass, train_step
from arriero.engine.planner.decoding import Decoder
from arriero.engine.planner.hardware import BYTES, Hardware
from arriero.engine.planner.memory import cache_slots, generate_static, resident_tokens, train_bytes
from arriero.engine.planner.models import ModelShape
from arriero.engine.planner.placement import Call, Place, Placement, meshes, search
from arriero.engine.planner.split import Workload


def reallocated(
    model: ModelShape,
    hardware: Hardware,
    gpus: int,
    work: Workload,
    *,
    reference: bool = False,
    seed: int = 0,
) -> Placement:
    """The best meshes and layouts of an iteration whose weights move between calls (states are offloaded)."""
    return search(
        iteration(model, hardware, gpus, work, reference=reference),
        bandwidth=hardware.network_bandwidth * hardware.link_share, seed=seed,
    )  # fmt: skip


def iteration(
    model: ModelShape, hardware: Hardware, gpus: int, work: Workload, *, reference: bool = False
) -> list[Call]:
    """The calls, in order; each with all meshes and layouts that it fits."""
    size = model.params * BYTES[work.train]
    tokens = resident_tokens(work.prompt, work.responses)
    places = [
        Place(mesh, Layout(tp=tp, pp=pp, dp=mesh.size // (tp * pp)))
        for mesh in meshes(gpus, hardware.node)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        if mesh.size % (tp * pp) == 0
    ]

    def generate(place: Place) -> float:
        tp = place.layout.tp
        slots = cache_slots(model, hardware, tp=tp, precision=work.generate, tokens=tokens)
        slots = min(slots, math.ceil(work.sequences / place.layout.dp))
        if slots < 1 or place.layout.pp > 1:  # a decoding step has no micro-batches to fill a pipeline with
            return math.inf
        decoder = Decoder(model=model, hardware=hardware, tp=tp, precision=work.generate, slots=slots)
        rate = decoder.tokens_per_second(work.prompt, work.responses) * place.layout.dp
        return work.sequences * work.responses.mean / rate

    def train(place: Place) -> float:
        if train_bytes(model, place.layout, work.work()) > hardware.memory:
            return math.inf
        return train_step(model, hardware, place.layout, work.work()).total

    def score(place: Place) -> float:
        if generate_static(model, place.layout.devices, work.train) > hardware.memory:
            return math.inf
        return forward_pass(model, hardware, place.layout, work.work())

    def call(name: str, of: str, seconds: Callable[[Place], float], after: tuple[str, ...]) -> Call:
        known = {p: t for p in places if (t := seconds(p)) < math.inf}
        return Call(name=name, model=of, seconds=known, after=after, weight_bytes=size)

    calls = [call("generate", "policy", generate, ())]
    if reference:
        calls.append(call("reference", "reference", score, ("generate",)))
    calls.append(call("train", "policy", train, tuple(c.name for c in calls)))
    return calls
