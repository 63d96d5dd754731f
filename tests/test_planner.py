"""Cost models against numbers from elsewhere, plans against their own constraints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arriero.engine.errors import UserError
from arriero.engine.planner.costs import Layout, TrainWork, sync_seconds, train_step
from arriero.engine.planner.decoding import Decoder, longest_first
from arriero.engine.planner.dispatch import balanced, even, skew_aware
from arriero.engine.planner.flow import Flow, steady
from arriero.engine.planner.hardware import HARDWARE, Hardware, hardware
from arriero.engine.planner.lengths import fixed, log_normal, recorded
from arriero.engine.planner.memory import cache_slots, resident_tokens, train_bytes, train_static
from arriero.engine.planner.models import MODELS, model
from arriero.engine.planner.placement import Call, Mesh, Place, evaluate, meshes, search
from arriero.engine.planner.plan import asynchronous, synchronous
from arriero.engine.planner.reallocate import iteration, reallocated
from arriero.engine.planner.split import Workload

H100, SMALL, BIG = hardware("h100"), model("llama-3.1-8b"), model("llama-3.1-405b")
WORK = Workload(groups=64, samples=8, responses=log_normal(1000, sigma=0.7, longest=4096))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-8b", 8_030_261_248),  # the model cards' tensors, counted
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-72b", 72.7e9),
        ("qwen2.5-1.5b", 1.5437e9),
    ],
)
def test_models_have_the_parameters_that_their_cards_say(name: str, params: float) -> None:
    assert model(name).params == pytest.approx(params, rel=1e-3)


def test_cache_of_a_70b_token_takes_320_kib() -> None:
    """80 layers x 2 x 8 heads x 128 numbers of 2 bytes."""
    assert model("llama-3.1-70b").cache_bytes(2) == 327_680


def test_shape_is_read_from_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    assert model(str(tmp_path)).params == 100 * 64 + 2 * (64 * 16 * 12 + 3 * 64 * 128 + 128) + 64
    path.write_text(json.dumps({**config, "num_local_experts": 8}))
    with pytest.raises(UserError, match="dense models only"):
        model(str(path))
    path.write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(UserError, match="num_attention_heads"):
        model(str(path))


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="h100"):
        hardware("h1000")
    with pytest.raises(UserError, match=r"llama-3\.1-405b"):
        model("llama-9")


@pytest.mark.parametrize("name", HARDWARE)
def test_every_device_names_its_source(name: str) -> None:
    h = HARDWARE[name]
    assert h.source
    assert h.rate("fp8") >= h.rate("bf16") >= h.rate("fp32") > 0


@pytest.mark.parametrize(
    ("gpus", "dp", "sequences", "published"), [(8192, 64, 32, 430), (16384, 128, 16, 400)]
)
def test_pretraining_of_llama_405b_reaches_its_published_rate(
    gpus: int, dp: int, sequences: int, published: float
) -> None:
    """arXiv:2407.21783, table 4: 430 and 400 TFLOP/s per GPU."""
    work = TrainWork(tokens=dp * sequences * 8192, context=4096, micro_tokens=8192, recompute=False)
    cost = train_step(BIG, H100, Layout(tp=8, pp=16, dp=dp, interleave=4, shard="optimizer"), work)
    rate = work.tokens * 3 * BIG.forward_flops(4096) / cost.total / gpus / 1e12
    assert rate == pytest.approx(published, rel=0.1)


def test_adam_in_mixed_precision_holds_16_bytes_a_parameter() -> None:
    """arXiv:1910.02054, section 3.1."""
    assert train_static(SMALL, Layout(shard="none"), "bf16") == 16 * SMALL.params
    shared = train_static(SMALL, Layout(dp=64, shard="full"), "bf16")
    assert shared == pytest.approx(16 * SMALL.params / 64, rel=0.5)
    assert shared > 16 * SMALL.params / 64  # two layers are whole


def test_a_pipeline_of_p_stages_and_m_micro_batches_idles_p_minus_1_of_m() -> None:
    """arXiv:2104.04473, section 2.2."""
    work = TrainWork(tokens=32 * 8192, context=1000, micro_tokens=8192)
    cost = train_step(SMALL, H100, Layout(pp=4, shard="optimizer"), work)
    assert cost.bubble == pytest.approx(3 / 32 * (cost.compute + cost.launch + cost.tensor))


def test_decoding_one_sequence_takes_as_long_as_reading_the_weights() -> None:
    quick = replace(H100, kernel_s=0.0)
    step = Decoder(model=SMALL, hardware=quick).step(1, 0)
    assert step == pytest.approx(2 * SMALL.params / (3.35e12 * 0.75))


def test_a_token_takes_longer_in_a_larger_batch_but_a_batch_gives_more_of_them() -> None:
    decoder = Decoder(model=SMALL, hardware=H100)
    latency = [decoder.per_token(b, 1000) for b in (1, 8, 64, 512)]
    assert latency == sorted(latency)
    rates = [b / t for b, t in zip((1, 8, 64, 512), latency, strict=True)]
    assert rates == sorted(rates)


def test_makespan_of_equal_sequences_is_their_steps_one_after_the_other() -> None:
    decoder = Decoder(model=SMALL, hardware=H100, slots=4)
    once = sum(decoder.step(4, 4 * k) for k in range(50))
    assert decoder.makespan([50.0] * 4, prompt=0) == pytest.approx(once, rel=0.01)
    assert decoder.makespan([50.0] * 8, prompt=0) == pytest.approx(2 * once, rel=0.01)


def test_longest_first_ends_sooner_than_longest_last() -> None:
    decoder = Decoder(model=SMALL, hardware=H100, slots=4)
    lengths = [100.0] * 12 + [1000.0]
    assert decoder.makespan(longest_first(lengths), 0) < decoder.makespan(lengths, 0)


def test_lengths_have_the_mean_that_was_asked_for_and_a_tail() -> None:
    lengths = log_normal(8000, sigma=1.0, longest=27648)
    assert lengths.mean == pytest.approx(8000, rel=1e-6)
    assert lengths.quantile(0.5) < 6000
    assert lengths.longest == 27648
    assert lengths.expected_longest(1) == pytest.approx(8000)
    assert recorded([3, 1, 2]).expected_longest(2) == pytest.approx((1 + 2 * 3 + 3 * 5) / 9)
    assert fixed(7).spread(3).tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="between 0 and the longest"):
        log_normal(100, sigma=1, longest=50)


def test_sequences_under_way_are_longer_than_those_that_end() -> None:
    """Length bias: of 1 and 99 tokens, half of the places hold the long one's 99 steps."""
    assert resident_tokens(0, recorded([1, 99])) == pytest.approx((1 + 99**2) / 2 / 100)


def test_a_bigger_device_holds_more_sequences() -> None:
    slots = [
        cache_slots(SMALL, hardware(h), tp=1, precision="bf16", tokens=2000) for h in ("h100", "h200", "b200")
    ]
    assert slots == sorted(set(slots))


def test_weights_of_405b_cross_in_about_two_seconds() -> None:
    """LlamaRL, arXiv:2505.24034: `about 2 seconds`; the wire alone, without registration and verification."""
    seconds = sync_seconds(BIG, H100, senders=512, receivers=512, replica=16, precision="bf16")
    assert 1.0 < seconds < 2.5


@pytest.mark.parametrize("gpus", [8, 64])
def test_plans_keep_to_their_devices_and_memory(gpus: int) -> None:
    sync, late = synchronous(SMALL, H100, gpus, WORK), asynchronous(SMALL, H100, gpus, WORK)
    assert sync.training.layout.devices == gpus
    assert late.training.layout.devices + late.generation.devices <= gpus
    for s in (sync, late):
        assert s.training.bytes <= H100.memory
        assert train_bytes(SMALL, s.training.layout, WORK.work()) == pytest.approx(s.training.bytes, rel=2)
        assert s.step_s >= max(s.training.seconds, s.generation.seconds) * 0.99


def test_a_model_that_does_not_fit_is_refused_with_its_size() -> None:
    with pytest.raises(UserError, match="405b doesn't fit: training alone holds 6494 GB"):
        synchronous(BIG, H100, 8, WORK)
    with pytest.raises(UserError, match="use more or larger devices"):
        asynchronous(BIG, H100, 8, WORK)


def test_a_shared_memory_makes_the_synchronous_step_no_shorter() -> None:
    shared, alone = synchronous(SMALL, H100, 8, WORK), synchronous(SMALL, H100, 8, WORK, offload=True)
    assert alone.step_s <= shared.step_s


def test_more_staleness_shortens_a_step_with_long_tails() -> None:
    steps = [asynchronous(SMALL, H100, 64, WORK, staleness=s).step_s for s in (1, 4)]
    assert steps[1] < steps[0]


def test_other_devices_for_generation_are_used() -> None:
    late = asynchronous(SMALL, H100, 16, WORK, generators=hardware("h20"))
    assert late.generation.decoder.hardware.name == "h20"


def flow(**changes: float) -> Flow:
    decoder = Decoder(model=SMALL, hardware=H100, slots=64)
    base = Flow(decoder=decoder, prompt=100, responses=fixed(500), share=64, train_s=1.0, staleness=0)
    return replace(base, **changes)  # type: ignore[arg-type]  # names of fields with numbers


def test_flow_in_turns_is_the_sum_and_with_delay_the_longer_of_the_two() -> None:
    generate = flow().decoder.makespan([500.0] * 64, 100)
    assert steady(flow()).step_s == pytest.approx(generate + 1.0, rel=1e-3)
    assert steady(flow(staleness=1, train_s=3 * generate)).step_s == pytest.approx(3 * generate, rel=0.02)
    late = steady(flow(staleness=1, train_s=generate / 3))
    assert late.step_s == pytest.approx(generate, rel=0.1)
    assert late.trainer_idle == pytest.approx(2 / 3, abs=0.1)


def test_a_group_begun_too_long_ago_is_dropped_and_costs_its_work() -> None:
    tail = replace(flow(staleness=1), responses=log_normal(500, sigma=1.5, longest=8000), samples=8)
    assert steady(replace(tail, drop=True)).step_s > steady(tail).step_s


def test_dispatch_by_length_is_never_slower_and_helps_a_long_tail() -> None:
    decoder = Decoder(model=SMALL, hardware=H100, slots=64)
    lengths = log_normal(2000, sigma=1.2, longest=20000).spread(256).tolist()
    blind = even(decoder, lengths, 100, 4)
    knowing = skew_aware(decoder, lengths, 100, 4)
    assert knowing.seconds < blind.seconds
    assert 0 < knowing.tail_replicas < 4
    assert skew_aware(decoder, [500.0] * 64, 100, 4).seconds <= even(decoder, [500.0] * 64, 100, 4).seconds


def test_balancing_gives_units_in_proportion_to_the_work() -> None:
    assert balanced(3.0, 1.0, 16) == (12, 4)
    assert balanced(1.0, 1.0, 2) == (1, 1)
    with pytest.raises(ValueError, match="can't be split"):
        balanced(1.0, 1.0, 1)


def places(*sizes: tuple[int, int]) -> list[Place]:
    return [Place(Mesh(first, size), Layout(dp=size)) for first, size in sizes]


def test_calls_on_the_same_devices_take_turns_and_weights_cost_their_move() -> None:
    whole, left, right = places((0, 8), (0, 4), (4, 4))
    a = Call(name="a", model="policy", seconds={whole: 1.0, left: 2.0}, weight_bytes=80.0)
    b = Call(name="b", model="reward", seconds={whole: 1.0, right: 2.0})
    c = Call(name="c", model="policy", seconds={whole: 1.0}, after=("a", "b"), weight_bytes=80.0)
    in_turns = evaluate([a, b, c], {"a": whole, "b": whole, "c": whole}, bandwidth=10)
    assert (in_turns.seconds, in_turns.moving_s) == (3.0, 0.0)
    apart = evaluate([a, b, c], {"a": left, "b": right, "c": whole}, bandwidth=10)
    assert apart.seconds == 2.0 + 80 / 4 / 10 + 1.0
    assert search([a, b, c], bandwidth=10).seconds == 3.0


def test_annealing_finds_what_trying_all_finds() -> None:
    calls = iteration(SMALL, H100, 8, WORK, reference=True)
    best = search(calls, bandwidth=1e11, exhaustive=10**9)
    assert search(calls, bandwidth=1e11, exhaustive=0, tries=5000).seconds == pytest.approx(
        best.seconds, rel=0.02
    )


def test_reallocation_is_no_slower_than_one_layout_for_all() -> None:
    calls = iteration(SMALL, H100, 8, WORK)
    common = [p for p in calls[0].seconds if all(p in c.seconds for c in calls)]
    one = min(evaluate(calls, {c.name: p for c in calls}, bandwidth=1e11).seconds for p in common)
    assert reallocated(SMALL, H100, 8, WORK).seconds <= one
    with pytest.raises(ValueError, match="generate fits nowhere"):
        search(iteration(BIG, H100, 8, WORK), bandwidth=1e11)


def test_meshes_are_aligned_halves() -> None:
    assert {m.size for m in meshes(32, 8)} == {32, 16, 8}
    assert len(meshes(4, 8)) == 1 + 2 + 4
    assert Mesh(0, 4).overlaps(Mesh(3, 1))
    assert not Mesh(0, 4).overlaps(Mesh(4, 4))


def test_every_named_model_and_device_can_be_planned_for_or_refused() -> None:
    for shape in MODELS.values():
        for device in (HARDWARE["b200"], HARDWARE["cpu"]):
            try:
                step = asynchronous(shape, device, 16, WORK).step_s
            except UserError:
                continue
            assert 0 < step < math.inf


def test_scaling_a_device_scales_the_time() -> None:
    decoder = Decoder(model=SMALL, hardware=H100)
    slower: Hardware = H100.scaled(0.5)
    assert replace(decoder, hardware=slower).step(8, 8000) == pytest.approx(2 * decoder.step(8, 8000))
    assert np.isfinite(slower.bandwidth)
