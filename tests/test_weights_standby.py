"""A second set of parameters: a version arrives beside the one in use, and the two change places."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch
from torch import Tensor, nn

from arriero.engine.weights import Standby, WeightError, WeightReceiver, WeightSender, destroy

torch.set_num_threads(1)


@pytest.fixture
def url() -> Iterator[str]:
    url = f"shm://test-{uuid4().hex}"
    yield url
    destroy(url)


class Tied(nn.Module):
    """An embedding and a head that are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(tokens))
        return logits


def test_a_version_is_used_only_after_the_switch_and_tied_parameters_stay_tied(url: str) -> None:
    trainer, generator, tokens = Tied(), Tied(), torch.arange(9)
    sent = dict(trainer.named_parameters())
    sender = WeightSender(url, sent)
    receiver = WeightReceiver("generator-0")
    standby = Standby(receiver, dict(generator.named_parameters()))
    addresses: set[int] = set()
    for version in range(4):
        with torch.no_grad():
            trainer.embed.weight.add_(1)
        before = generator(tokens)
        standby.prepare(sender.publish(version, sent))
        assert torch.equal(generator(tokens), before)
        assert standby.switch() == version
        assert torch.equal(generator(tokens), trainer(tokens))
        assert generator.head.weight is generator.embed.weight
        addresses.add(generator.embed.weight.data_ptr())
    assert len(addresses) == 2  # memory is exchanged, never allocated
    sender.close()
    receiver.close()


def test_two_names_of_one_parameter_share_their_memory_after_every_switch(url: str) -> None:
    trainer, generator = Tied(), Tied()
    sender, receiver = WeightSender(url, dict(trainer.named_parameters())), WeightReceiver("generator-0")
    standby = Standby(receiver, generator.state_dict(keep_vars=True))  # both names
    for version in range(3):
        with torch.no_grad():
            trainer.embed.weight.add_(1)
        standby.prepare(sender.publish(version, dict(trainer.named_parameters())))
        standby.switch()
        assert torch.equal(generator.head.weight, trainer.embed.weight)
        assert generator.head.weight.data_ptr() == generator.embed.weight.data_ptr()
    sender.close()
    receiver.close()


def test_a_version_that_fails_its_verification_leaves_the_one_in_use_alone(url: str) -> None:
    weights, used = {"w": torch.ones(1000)}, {"w": torch.zeros(1000)}
    sender = WeightSender(url, weights)
    receiver = WeightReceiver("generator-0")
    standby = Standby(receiver, used)
    good = sender.publish(0, weights)
    cells = ("0" * 32, *good.cells[1:])
    with pytest.raises(WeightError, match=r"w\[0:1000\]"):
        standby.prepare(good.model_copy(update={"cells": cells}))
    assert torch.equal(used["w"], torch.zeros(1000))
    with pytest.raises(AssertionError, match="prepare a version before each switch"):
        standby.switch()
    standby.prepare(good)
    standby.switch()
    assert torch.equal(used["w"], weights["w"])
    sender.close()
    receiver.close()
