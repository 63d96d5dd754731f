"""What must not pass for a sync: an error names the tensor, or says how many of how many."""

import os
import subprocess
import sys
import time
from threading import Thread

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from arriero.engine.weights import StaleWeights, WeightError, WeightReceiver, WeightSender, destroy
from arriero.engine.weights.shm import Segment, path_of
from arriero.schemas.weights import WeightManifest, cells_fingerprint
from tests.weight_models import like, model

torch.set_num_threads(1)
DATA_AT = 69632  # first slot in the file: a header of 320 + 128 * 64 words, at a page boundary


def flip(url: str, at: int) -> None:
    """Change one bit of a file, `at` bytes after the beginning of slot 0."""
    with path_of(url).open("r+b") as file:
        file.seek(DATA_AT + at)
        byte = file.read(1)[0]
        file.seek(DATA_AT + at)
        file.write(bytes([byte ^ 1]))


def test_mangled_names_are_received_0_of_n(url: str, receiver: WeightReceiver) -> None:
    tensors = {"layer.0.lora_A": torch.randn(3, 3), "layer.0.lora_B": torch.randn(3, 3)}
    into = {f"base_model.{name}": torch.zeros(3, 3) for name in tensors}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with pytest.raises(WeightError, match=r"received 0 of 2 tensors;.*nearest.*base_model\.layer"):
        receiver.receive(manifest, into)
    with pytest.raises(WeightError, match="received 0 of 2 tensors"):
        receiver.receive(manifest, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "received 6 of 7 tensors; no place for norm"),
        ({"none": None}, "received 6 of 7 tensors; no place for none"),
        ({"other": torch.zeros(2)}, "received 7 of 7 tensors; nothing for other"),
        (
            {"norm": torch.zeros(71, dtype=torch.float16)},
            r"norm has shape \(71,\) here, but \(70,\) was sent",
        ),
        ({"step": torch.tensor(0, dtype=torch.int32)}, "received: step is int32, its layout says int64"),
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
    with pytest.raises(WeightError, match=r"generator-0, version 0: b\[0:100000\]: the buffer holds"):
        receiver.receive(manifest, into)


def test_uninitialised_memory_is_found(url: str, receiver: WeightReceiver) -> None:
    tensors = {"a": torch.ones(16), "b": torch.ones(1000)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with path_of(url).open("r+b") as file:
        file.seek(DATA_AT + 64)
        file.write(os.urandom(4000))
    with pytest.raises(WeightError, match=r"b\[0:1000\]: the buffer holds"):
        receiver.receive(manifest, like(tensors))


def test_a_slot_that_was_never_written_is_an_error(url: str, receiver: WeightReceiver) -> None:
    manifest = WeightSender(url, model()).publish(0, model())
    with pytest.raises(WeightError, match=r"slot 1 of .* was never written"):
        receiver.receive(manifest.model_copy(update={"slot": 1}), like(model()))
    with pytest.raises(WeightError, match="manifest says slot 2"):
        receiver.receive(manifest.model_copy(update={"slot": 2}), like(model()))


def test_parameters_made_anew_at_each_access_are_an_error(url: str, receiver: WeightReceiver) -> None:
    class Dequantised(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return super().__getitem__(name).clone()

    tensors = {"w": torch.randn(5)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with pytest.raises(WeightError, match="w is a new tensor at each access"):
        receiver.receive(manifest, Dequantised(w=torch.zeros(5)))


def test_two_tensors_received_into_one_memory_are_refused(url: str, receiver: WeightReceiver) -> None:
    tensors = {"embed": torch.randn(10, 4), "head": torch.randn(10, 4)}
    tied = torch.zeros(10, 4)
    manifest = WeightSender(url, tensors).publish(0, tensors)
    with pytest.raises(WeightError, match="received: embed, head share memory, but their layout has them"):
        receiver.receive(manifest, {"embed": tied, "head": tied})


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
    mixed = old.model_copy(update={"session": new.session})
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
        """The first look at a parameter under the lease takes too long: the sender goes on."""

        sprung = False

        def __getitem__(self, name: str) -> Tensor:
            if segment.readers(manifest.slot) and not self.sprung:
                self.sprung = True
                sender.publish(1, model(1))
                sender.publish(2, model(2))
                assert sender.overtaken == ("generator-0",)
            return super().__getitem__(name)

    segment = Segment.open(url)
    with pytest.raises(StaleWeights, match="generator-0 was overtaken: version 0 was overwritten"):
        receiver.receive(manifest, Overtaken(like(model())))
    segment.close()
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


def test_a_publish_must_have_the_layout_it_began_with(url: str) -> None:
    sender = WeightSender(url, model())
    sender.publish(4, model())
    for change, message in (
        ({"norm": torch.zeros(71, dtype=torch.float16)}, r"norm has shape \(71,\), its layout \(70,\)"),
        ({"norm": torch.zeros(70)}, "norm is float32, its layout says float16"),
        ({"other": torch.zeros(70)}, "published: 7 of 7 tensors; nothing for other"),
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
    assert new.session != announced.session
    receiver.receive(new, like(larger))


def test_weights_that_a_step_has_not_changed_are_not_announced(url: str, receiver: WeightReceiver) -> None:
    sender = WeightSender(url, model())
    first = sender.publish(0, model())
    with pytest.raises(WeightError, match="all 6 parts of it are bit-identical to version 0"):
        sender.publish(1, model())
    receiver.receive(first, like(model()))
    receiver.receive(sender.publish(1, model(1)), like(model()))
    assert sender.publish(2, model(1), must_change=False).version == 2


@pytest.mark.parametrize("bad", ["shm://../etc", "shm://a/b", "file://x", "shm://", "shm://.hidden"])
def test_a_url_is_one_plain_name(bad: str) -> None:
    with pytest.raises(WeightError, match="is no shm://<name>"):
        WeightSender(bad, model())


def test_a_segment_that_others_may_write_is_refused(url: str, receiver: WeightReceiver) -> None:
    manifest = WeightSender(url, model()).publish(0, model())
    path_of(url).chmod(0o666)
    with pytest.raises(WeightError, match="not this user's own, private file"):
        receiver.receive(manifest, like(model()))


def test_a_manifest_checks_itself() -> None:
    plan, cells = "b" * 32, ("0" * 32, "1" * 32)
    fields: dict[str, object] = {
        "version": 0, "url": "shm://x", "session": "a" * 32, "plan": plan, "slot": 0, "cells": cells,
        "fingerprint": cells_fingerprint(plan, cells),
    }  # fmt: skip
    WeightManifest.model_validate(fields)
    for change in (
        {"version": -1},
        {"slot": -1},
        {"more": 1},
        {"cells": ()},
        {"url": "x"},
        {"fingerprint": "f" * 32},
        {"cells": cells[::-1]},
        {"plan": "c" * 32},
    ):
        with pytest.raises(ValidationError):
            WeightManifest.model_validate({**fields, **change})


def test_the_schema_does_not_import_torch() -> None:
    program = "import sys, arriero.schemas.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
