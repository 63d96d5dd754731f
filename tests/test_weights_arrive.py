"""What one sender puts into shared memory is what a receiver gets, for any tensors."""

from uuid import uuid4

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arriero.engine.weights import WeightError, WeightReceiver, WeightSender, destroy
from arriero.engine.weights.layout import TORCH_DTYPES
from arriero.engine.weights.shm import path_of
from arriero.schemas.weights import WeightManifest
from tests.weight_models import like, model

torch.set_num_threads(1)


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


@given(states().filter(lambda tensors: any(t.numel() for t in tensors.values())))
@settings(max_examples=60)
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
        assert all(torch.equal(into[name], tensor) for name, tensor in model(version).items())
    assert slots == [0, 1, 0, 1]
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == addresses
    assert path_of(url).stat().st_mode & 0o777 == 0o600


def test_a_parameter_larger_than_a_copy_chunk_arrives_whole(url: str, receiver: WeightReceiver) -> None:
    tensors = {"w": torch.arange(1_000_003, dtype=torch.float32)}  # 4 MB, no multiple of a chunk
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
    with pytest.raises(WeightError, match=r"w\[0:2\]: 1 values of float32 overflow in torch\.float16"):
        receiver.receive(manifest, {"w": torch.zeros(2, dtype=torch.float16)})


def test_tied_parameters_are_sent_once(url: str, receiver: WeightReceiver) -> None:
    weight = torch.randn(100, 16)
    tensors = {"embed": weight, "head": weight.view(100, 16), "norm": torch.ones(3)}
    manifest = WeightSender(url, tensors).publish(0, tensors)
    assert {n: tuple(t.shape) for n, t in receiver.tensors(manifest).items()} == {
        "embed": (100, 16), "norm": (3,),
    }  # fmt: skip
    tied = torch.zeros(100, 16)
    into = {"embed": tied, "head": tied, "norm": torch.zeros(3)}
    receiver.receive(manifest, into)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in into.items())
    with pytest.raises(WeightError, match="received 2 of 2 tensors; nothing for head"):
        receiver.receive(manifest, {**into, "head": torch.zeros(100, 16)})


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
