"""The weight plane over shared memory: what arrives is what was sent, or an error says what is not.

Processes are started from this same file (`python tests/test_weights.py reader ...`), so that the tests that
kill, stop and race them use real ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from arriero.engine.weights import (
    StaleWeights,
    WeightError,
    WeightReceiver,
    WeightSender,
    destroy,
    fingerprint_weights,
    verify_weights,
)
from arriero.engine.weights.layout import TORCH_DTYPES
from arriero.engine.weights.shm import Segment, path_of
from arriero.schemas.weights import TensorSpec, WeightManifest, weights_fingerprint

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1]
DATA_AT = 69632  # first slot in the file: a header of 128 + 128 * 64 words, at a page boundary


@pytest.fixture
def url() -> Iterator[str]:
    url = f"shm://test-{uuid4().hex}"
    yield url
    destroy(url)
    assert not path_of(url).exists()


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    receiver = WeightReceiver("generator-0")
    yield receiver
    receiver.close()


def model(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(1000, 64, dtype=torch.bfloat16, generator=random),
        "layer.weight": torch.randn(300, 70, generator=random),
        "layer.transposed": torch.randn(40, 30, generator=random).t(),
        "norm": torch.randn(70, dtype=torch.float16, generator=random),
        "step": torch.tensor(7 + seed),
        "mask": torch.rand(9, generator=random) > 0.5,
        "none": torch.empty(0, 4),
    }


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}


def flip(url: str, at: int) -> None:
    """Change one bit of a file, `at` bytes after the beginning of slot 0."""
    with path_of(url).open("r+b") as file:
        file.seek(DATA_AT + at)
        byte = file.read(1)[0]
        file.seek(DATA_AT + at)
        file.write(bytes([byte ^ 1]))


# What arrives


@st.composite
def states(draw: st.DrawFn) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True)):
        dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        nbytes = torch.empty(shape).numel() * dtype.itemsize
        # Any bit pattern is a value, NaN with payload included; bool is 0 or 1.
        values = draw(st.binary(min_size=nbytes, max_size=nbytes))
        raw = torch.tensor(list(values), dtype=torch.uint8)
        raw = raw % 2 if dtype == torch.bool else raw
        tensor = raw.view(dtype).view(shape)
        tensors[name] = tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor
    return tensors


@given(states())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_round_trip_is_exact_for_any_shape_and_dtype(tensors: dict[str, Tensor]) -> None:
    url = f"shm://test-{uuid4().hex}"
    sender, receiver = WeightSender(url, tensors), WeightReceiver("generator-0")
    try:
        manifest = sender.publish(0, tensors)
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        receiver.receive(WeightManifest.model_validate_json(manifest.model_dump_json()), into)
        for name, tensor in tensors.items():
            sent = tensor.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(into[name].contiguous().view(-1).view(torch.uint8), sent)
        assert manifest.fingerprint == fingerprint_weights(into) == fingerprint_weights(tensors)
        assert all(spec.offset % 64 == 0 for spec in manifest.tensors)
    finally:
        sender.close()
        receiver.close()
        destroy(url)


def test_parameters_keep_their_memory_and_take_each_version_in_turn(
    url: str, receiver: WeightReceiver
) -> None:
    sender = WeightSender(url, model())
    into = like(model())
    addresses = {name: tensor.data_ptr() for name, tensor in into.items()}
    slots: list[int] = []
    for version in (0, 1, 5, 7):  # two of one parity in turn: the newest stays readable all the same
        manifest = sender.publish(version, model(version))
        slots.append(manifest.slot)
        receiver.receive(manifest, into)
        verify_weights(manifest, into)
    assert slots == [0, 1, 0, 1]
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == addresses
    assert path_of(url).stat().st_mode & 0o777 == 0o600


def test_a_parameter_larger_than_a_copy_chunk_arrives_whole(url: str, receiver: WeightReceiver) -> None:
    tensors = {"w": torch.arange(1_000_003, dtype=torch.float32)}  # 4 MB, no multiple of 256 KiB
    into, half = {"w": torch.zeros(1_000_003)}, {"w": torch.zeros(1_000_003, dtype=torch.bfloat16)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    receiver.receive(manifest, into)
    receiver.receive(manifest, half)
    assert torch.equal(into["w"], tensors["w"])
    assert torch.equal(half["w"], tensors["w"].bfloat16())


def test_floats_are_cast_on_arrival(url: str, receiver: WeightReceiver) -> None:
    # 1 + 2^-9 lies between the bfloat16 neighbours 1 and 1 + 2^-7, nearer to 1.
    tensors = {"w": torch.tensor([1 + 2**-9, -0.0, float("nan"), float("inf")])}
    into = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    receiver.receive(WeightSender(url, tensors).publish(0, tensors), into)
    assert torch.equal(into["w"][:2].view(torch.int16), torch.tensor([0x3F80, -0x8000], dtype=torch.int16))
    assert into["w"][2].isnan()
    assert into["w"][3].isinf()


def test_a_cast_that_overflows_is_an_error(url: str, receiver: WeightReceiver) -> None:
    tensors = {"w": torch.tensor([1.0, 65520.0])}  # rounds to 65536, beyond the largest float16, 65504
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with pytest.raises(WeightError, match=r"w: 1 values of float32 overflow in torch\.float16"):
        receiver.receive(manifest, {"w": torch.zeros(2, dtype=torch.float16)})


def test_tied_parameters_are_sent_once(url: str, receiver: WeightReceiver) -> None:
    weight = torch.randn(100, 16)
    tensors = {"embed": weight, "head": weight.view(100, 16), "norm": torch.ones(3)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    assert manifest.nbytes == 6400 + 64
    tied, untied, one = torch.zeros(100, 16), torch.zeros(2, 100, 16), torch.zeros(100, 16)
    for into in (
        {"embed": tied, "head": tied, "norm": torch.zeros(3)},
        {"embed": untied[0], "head": untied[1], "norm": torch.zeros(3)},
        {"head": one, "norm": torch.zeros(3)},
    ):
        receiver.receive(manifest, into)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in into.items())


def test_a_receiver_may_know_a_received_parameter_by_one_more_name(
    url: str, receiver: WeightReceiver
) -> None:
    tensors = {"embed": torch.randn(10, 4)}
    tied = torch.zeros(10, 4)
    receiver.receive(WeightSender(url, tensors).publish(0, tensors), {"embed": tied, "head": tied})
    assert torch.equal(tied, tensors["embed"])


def test_parameters_that_require_gradients_are_written_in_place(url: str, receiver: WeightReceiver) -> None:
    sent, into = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
    state = dict(sent.named_parameters())
    receiver.receive(WeightSender(url, state).publish(0, state), dict(into.named_parameters()))
    assert torch.equal(into.weight, sent.weight)
    assert into.weight.requires_grad
    with torch.inference_mode():
        frozen = torch.nn.Linear(7, 5).state_dict()
    receiver.receive(WeightSender(url + "b", state).publish(0, state), frozen)
    destroy(url + "b")
    assert torch.equal(frozen["bias"], sent.bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_tensors_travel_through_pinned_memory(
    url: str, receiver: WeightReceiver, dtype: torch.dtype
) -> None:
    tensors = {"w": torch.randn(3000, 4001, device="cuda"), "t": torch.randn(30, 40, device="cuda").t()}
    into = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors.items()}
    receiver.receive(WeightSender(url, tensors).publish(0, tensors), into)
    assert all(torch.equal(into[name], tensor.to(dtype)) for name, tensor in tensors.items())


# What must not pass for a sync


def test_mangled_names_are_received_0_of_n(url: str, receiver: WeightReceiver) -> None:
    tensors = {"layer.0.lora_A": torch.randn(3, 3), "layer.0.lora_B": torch.randn(3, 3)}
    into = {f"base_model.{name}": torch.zeros(3, 3) for name in tensors}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with pytest.raises(
        WeightError, match=r"received 0 of 2 tensors of version 0.*nearest.*base_model\.layer"
    ):
        receiver.receive(manifest, into)
    with pytest.raises(WeightError, match="received 0 of 2 tensors"):
        receiver.receive(manifest, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "received 6 of 7 tensors of version 3; no place for norm"),
        ({"none": None}, "received 6 of 7 tensors of version 3; no place for none"),
        ({"other": torch.zeros(2)}, "received 7 of 7 tensors of version 3; nothing for other"),
        (
            {"norm": torch.zeros(71, dtype=torch.float16)},
            r"norm has shape \(71,\) here, but \(70,\) was sent",
        ),
        ({"step": torch.tensor(0, dtype=torch.int32)}, "step is int32 here, but int64 was sent"),
        ({"norm": torch.zeros(1, dtype=torch.float16).expand(70)}, "norm is an expanded view"),
        ({"norm": torch.zeros(70, device="meta", dtype=torch.float16)}, "norm is torch.strided on meta"),
    ],
)
def test_a_receiver_that_does_not_fit_is_untouched(
    url: str, receiver: WeightReceiver, change: dict[str, Tensor | None], message: str
) -> None:
    into = {name: t for name, t in {**like(model()), **change}.items() if t is not None}
    manifest = WeightSender(url, model()).publish(3, model())
    with pytest.raises(WeightError, match=message):
        receiver.receive(manifest, into)
    assert bool((into["embed"] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_flipped_bit_in_the_buffer_names_the_tensor(
    url: str, receiver: WeightReceiver, dtype: torch.dtype
) -> None:
    tensors = {"a": torch.randn(16), "b": torch.randn(100_000)}
    into = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in tensors.items()}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    flip(url, 64 + 299_999)
    with pytest.raises(WeightError, match="generator-0, version 0: b: the buffer holds"):
        receiver.receive(manifest, into)


def test_uninitialised_memory_is_found(url: str, receiver: WeightReceiver) -> None:
    tensors = {"a": torch.ones(16), "b": torch.ones(1000)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with path_of(url).open("r+b") as file:
        file.seek(DATA_AT + 64)
        file.write(os.urandom(4000))
    with pytest.raises(WeightError, match="b: the buffer holds"):
        receiver.receive(manifest, like(tensors))


def test_a_slot_that_was_never_written_is_an_error(url: str, receiver: WeightReceiver) -> None:
    manifest = WeightSender(url, model()).publish(0, model())
    with pytest.raises(WeightError, match=r"slot 1 of .* was never written"):
        receiver.receive(manifest.model_copy(update={"slot": 1}), like(model()))
    with pytest.raises(WeightError, match="manifest says slot 2"):
        receiver.receive(manifest.model_copy(update={"slot": 2}), like(model()))


def test_a_receiver_that_ignored_the_payload_is_found(url: str) -> None:
    manifest = WeightSender(url, model()).publish(0, model())
    with pytest.raises(WeightError, match="6 of 7 tensors are not those of version 0"):
        verify_weights(manifest, like(model()))  # the empty one is right by nature


def test_parameters_made_anew_at_each_access_are_an_error(url: str, receiver: WeightReceiver) -> None:
    class Dequantised(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return super().__getitem__(name).clone()

    tensors = {"w": torch.randn(5)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with pytest.raises(WeightError, match="w is a new tensor at each access"):
        receiver.receive(manifest, Dequantised(w=torch.zeros(5)))


def test_two_tensors_received_into_one_memory_are_found(url: str, receiver: WeightReceiver) -> None:
    tensors = {"embed": torch.randn(10, 4), "head": torch.randn(10, 4)}
    tied = torch.zeros(10, 4)
    with pytest.raises(WeightError, match="embed does not hold what was sent"):
        receiver.receive(WeightSender(url, tensors).publish(0, tensors), {"embed": tied, "head": tied})


def test_parts_of_one_fused_parameter_are_received(url: str, receiver: WeightReceiver) -> None:
    tensors = {"q": torch.randn(8, 4), "k": torch.randn(8, 4)}
    fused = torch.zeros(8, 8)
    receiver.receive(WeightSender(url, tensors).publish(0, tensors), {"q": fused[:, :4], "k": fused[:, 4:]})
    assert torch.equal(fused, torch.cat([tensors["q"], tensors["k"]], dim=1))


def test_a_manifest_of_another_run_is_refused(url: str, receiver: WeightReceiver) -> None:
    sender = WeightSender(url, model())
    old = sender.publish(0, model())
    receiver.receive(old, like(model()))
    sender.close()
    destroy(url)
    with pytest.raises(WeightError, match="no weights at shm://test-"):
        WeightReceiver("generator-1").receive(old, like(model()))
    new = WeightSender(url, model(1)).publish(0, model(1))
    receiver.receive(new, like(model()))
    with pytest.raises(WeightError, match="manifest of version 0 is of another run"):
        receiver.receive(old, like(model()))
    mixed = old.model_copy(update={"segment": new.segment})
    with pytest.raises(WeightError, match="it is of another run"):
        receiver.receive(mixed, like(model()))


def test_an_overwritten_version_is_stale(url: str, receiver: WeightReceiver) -> None:
    sender = WeightSender(url, model())
    first, *_, last = [sender.publish(version, model(version)) for version in range(3)]
    with pytest.raises(StaleWeights, match="version 0 is no longer in slot 0"):
        receiver.receive(first, like(model()))
    receiver.receive(last, like(model()))


def test_a_reader_overtaken_in_the_middle_sees_it(url: str, receiver: WeightReceiver) -> None:
    sender = WeightSender(url, model(), lease_timeout_s=0)
    manifest = sender.publish(0, model())

    class Overtaken(dict[str, Tensor]):
        """The last look at the parameters comes after the copy; the sender is faster."""

        looks = 0

        def __getitem__(self, name: str) -> Tensor:
            self.looks += 1
            if self.looks == 8:
                sender.publish(1, model(1))
                sender.publish(2, model(2))
                assert sender.overtaken == ("generator-0",)
            return super().__getitem__(name)

    with pytest.raises(StaleWeights, match="generator-0 was overtaken: version 0 was overwritten"):
        receiver.receive(manifest, Overtaken(like(model())))
    sender.publish(3, model(3))
    assert sender.overtaken == ()


def test_nobody_begins_to_read_what_is_about_to_be_overwritten(url: str, receiver: WeightReceiver) -> None:
    sender = WeightSender(url, model(), lease_timeout_s=60)
    old, new = sender.publish(0, model()), sender.publish(1, model(1))
    segment = Segment.open(url)
    entry = segment.claim("generator-1")
    with segment.leased(entry, old.slot, old.version):
        overwriting = Thread(target=sender.publish, args=(2, model(2)))
        overwriting.start()
        until = time.monotonic() + 10
        while not segment.state(old.slot).closed and time.monotonic() < until:
            time.sleep(0.001)
        with pytest.raises(StaleWeights, match="version 0 is no longer in slot 0"):
            receiver.receive(old, like(model()))
        receiver.receive(new, like(model()))
        assert overwriting.is_alive()
    overwriting.join(timeout=10)
    assert not overwriting.is_alive()
    assert sender.overtaken == ()
    segment.close()


# What a sender refuses


def test_a_publish_must_have_the_layout_it_began_with(url: str) -> None:
    sender = WeightSender(url, model())
    sender.publish(4, model())
    for change, message in (
        ({"norm": torch.zeros(71, dtype=torch.float16)}, r"norm is now float16\(71,\), but the layout has"),
        ({"norm": torch.zeros(70)}, "norm is now float32"),
        ({"other": torch.zeros(70)}, "given 7 of the 7 tensors of the layout; nothing for other"),
        ({"norm": torch.zeros(70).to_sparse()}, "norm is torch.sparse_coo"),
        ({"norm": torch.zeros(70, dtype=torch.complex64)}, "norm is torch.complex64"),
    ):
        with pytest.raises(WeightError, match=message):
            sender.publish(5, {**model(), **change})
    with pytest.raises(ValueError, match="version 4 after version 4"):
        sender.publish(4, model())


def test_a_second_living_sender_is_refused_and_a_restarted_one_keeps_what_was_announced(
    url: str, receiver: WeightReceiver
) -> None:
    first = WeightSender(url, model())
    with pytest.raises(WeightError, match="belongs to another sender that is alive"):
        WeightSender(url, model())
    _, _, announced = [first.publish(version, model(version)) for version in range(3)]
    assert announced.slot == 0
    first.close()
    receiver.receive(announced, like(model()))
    restarted = WeightSender(url, model())
    receiver.receive(announced, like(model()))
    assert restarted.publish(1, model(1)).slot == 1  # replays from its checkpoint
    receiver.receive(announced, like(model()))
    restarted.close()
    larger = {**model(), "more": torch.ones(3)}
    new = WeightSender(url, larger).publish(2, larger)
    assert new.segment != announced.segment
    receiver.receive(new, like(larger))


def test_weights_that_a_step_has_not_changed_are_not_announced(url: str, receiver: WeightReceiver) -> None:
    sender = WeightSender(url, model())
    first = sender.publish(0, model(), must_change=True)
    with pytest.raises(WeightError, match="version 1 is not announced: bit-identical to version 0"):
        sender.publish(1, model(), must_change=True)
    receiver.receive(first, like(model()))
    receiver.receive(sender.publish(1, model(1), must_change=True), like(model()))
    assert sender.publish(2, model(1)).version == 2


@pytest.mark.parametrize("bad", ["shm://../etc", "shm://a/b", "file://x", "shm://", "shm://.hidden"])
def test_a_url_is_one_plain_name(bad: str) -> None:
    with pytest.raises(WeightError, match="is no shm://<name>"):
        WeightSender(bad, model())


def test_a_segment_that_others_may_write_is_refused(url: str, receiver: WeightReceiver) -> None:
    manifest = WeightSender(url, model()).publish(0, model())
    path_of(url).chmod(0o666)
    with pytest.raises(WeightError, match="not this user's own, private file"):
        receiver.receive(manifest, like(model()))


# What a manifest refuses


def manifest_of(
    *specs: tuple[str, int, int], nbytes: int = 4096, change: Mapping[str, object] | None = None
) -> WeightManifest:
    """Manifest of float32 vectors (name, offset, length); the hash of four bytes 0 stands for each."""
    zero = "0" * 32
    tensors = tuple(
        TensorSpec(name=name, dtype="float32", shape=(size,), offset=at, nbytes=4 * size, fingerprint=zero)
        for name, at, size in specs
    )
    mark = weights_fingerprint((s.name, s.dtype, s.shape, s.fingerprint) for s in tensors)
    fields: dict[str, object] = {"version": 0, "url": "shm://x", "segment": zero, "slot": 0, "nbytes": nbytes}
    return WeightManifest.model_validate(
        {**fields, "tensors": tensors, "fingerprint": mark, **(change or {})}
    )


def test_a_manifest_checks_itself() -> None:
    good = manifest_of(("a", 0, 16), ("b", 64, 16), ("c", 64, 16), ("d", 64, 0))
    with pytest.raises(ValidationError, match="b and c overlap at byte 64"):
        manifest_of(("a", 0, 16), ("b", 64, 32), ("c", 64, 16))
    with pytest.raises(ValidationError, match="a and b overlap at byte 64"):
        manifest_of(("a", 0, 17), ("b", 64, 16))
    with pytest.raises(ValidationError, match="b ends at byte 128 of 100"):
        manifest_of(("a", 0, 16), ("b", 64, 16), nbytes=100)
    with pytest.raises(ValidationError, match="stand twice"):
        manifest_of(("a", 0, 16), ("a", 64, 16))
    for change in (
        {"version": -1},
        {"slot": -1},
        {"more": 1},
        {"tensors": ()},
        {"url": "x"},
        {"fingerprint": "f" * 32},
    ):
        with pytest.raises(ValidationError):
            manifest_of(("a", 0, 16), change=change)
    mangled = good.model_dump()
    mangled["tensors"][0]["name"] = "base_model.a"
    with pytest.raises(ValidationError, match="its tensors give"):
        WeightManifest.model_validate(mangled)


@pytest.mark.parametrize(
    "change", [{"nbytes": 63}, {"offset": 4}, {"shape": (-1,)}, {"dtype": "float"}, {"name": ""}]
)
def test_a_spec_checks_itself(change: dict[str, object]) -> None:
    good = {
        "name": "a",
        "dtype": "float32",
        "shape": (4, 4),
        "offset": 64,
        "nbytes": 64,
        "fingerprint": "0" * 32,
    }
    TensorSpec.model_validate(good)
    with pytest.raises(ValidationError):
        TensorSpec.model_validate({**good, **change})


def test_the_schema_does_not_import_torch() -> None:
    program = "import sys, arriero.schemas.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=environment(), check=False).returncode == 0


# Real processes


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def process(*arguments: str) -> Generator[tuple[subprocess.Popen[str], IO[str]], None, None]:
    """This file as a program, and its output; killed at the end, if it still runs."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout
        finally:
            child.kill()


def constant(version: int) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((256, 1024 + i), version, dtype=torch.float32) for i in range(6)}


def announce(newest: Path, manifest: WeightManifest) -> None:
    fresh = newest.with_suffix(".new")
    fresh.write_text(manifest.model_dump_json())
    fresh.rename(newest)


@pytest.mark.parametrize("lease_timeout_s", [5.0, 0.0])
def test_readers_of_a_writer_at_full_speed_see_whole_versions_in_order(
    url: str, tmp_path: Path, lease_timeout_s: float
) -> None:
    newest, stop = tmp_path / "newest.json", tmp_path / "stop"
    tensors = constant(0)
    sender = WeightSender(url, tensors, lease_timeout_s=lease_timeout_s)
    announce(newest, sender.publish(0, tensors))
    with (
        process("reader", "generator-0", str(newest), str(stop)) as (_, first),
        process("reader", "generator-1", str(newest), str(stop)) as (_, second),
    ):
        assert [first.readline(), second.readline()] == ["ready\n", "ready\n"]
        version, until = 0, time.monotonic() + 1
        while time.monotonic() < until:
            version += 1
            for tensor in tensors.values():
                tensor.fill_(version)
            announce(newest, sender.publish(version, tensors))
            if lease_timeout_s:
                assert sender.overtaken == ()
        stop.touch()
        reports = [json.loads(output.readline()) for output in (first, second)]
    assert version > 20
    for report in reports:
        assert report["torn"] == 0
        assert report["backwards"] == 0
        assert report["received"] > 5
        assert report["last"] == version


@pytest.mark.parametrize(("how", "expected"), [(signal.SIGKILL, ()), (signal.SIGSTOP, ("generator-7",))])
def test_a_receiver_that_fails_while_it_reads_costs_at_most_the_timeout(
    url: str, tmp_path: Path, how: signal.Signals, expected: tuple[str, ...]
) -> None:
    sender = WeightSender(url, constant(0), lease_timeout_s=1.5)
    announce(tmp_path / "newest.json", sender.publish(0, constant(0)))
    with process("holder", "generator-7", str(tmp_path / "newest.json")) as (holder, output):
        assert output.readline() == "leased\n"
        holder.send_signal(how)
        if how == signal.SIGKILL:
            holder.wait()
        sender.publish(1, constant(1))  # the other slot: nobody waits
        begun = time.monotonic()
        sender.publish(2, constant(2))
        took_s = time.monotonic() - begun
        assert sender.overtaken == expected
        assert took_s < (0.5 if how == signal.SIGKILL else 2.0)
        begun = time.monotonic()
        for version in (3, 4):  # still stopped, but not waited for twice
            sender.publish(version, constant(version))
            assert sender.overtaken == ()
        assert time.monotonic() - begun < 0.5


def run_reader(name: str, newest: Path, stop: Path) -> dict[str, int]:
    report = {"received": 0, "stale": 0, "torn": 0, "backwards": 0, "last": -1}
    receiver, into = WeightReceiver(name), constant(0)
    while True:
        ending = stop.exists()
        manifest = WeightManifest.model_validate_json(newest.read_text())
        report["backwards"] += manifest.version < report["last"]
        try:
            if manifest.version > report["last"]:
                receiver.receive(manifest, into)
                if not report["received"]:
                    print("ready", flush=True)
                report["received"] += 1
                report["torn"] += not all(bool((t == manifest.version).all()) for t in into.values())
                report["last"] = manifest.version
        except StaleWeights:
            report["stale"] += 1
        if ending:
            return report


def hold(name: str, newest: Path) -> None:
    manifest = WeightManifest.model_validate_json(newest.read_text())
    segment = Segment.open(manifest.url)
    with segment.leased(segment.claim(name), manifest.slot, manifest.version):
        print("leased", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "reader":
        print(json.dumps(run_reader(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
    else:
        hold(sys.argv[2], Path(sys.argv[3]))
