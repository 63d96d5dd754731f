"""One contract for every transport of the weight plane, with real processes that fail in real ways."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args
from uuid import uuid4

import pytest

from arriero.engine.weights import destroy, nixl_transport
from arriero.schemas.layouts import Parallelism
from tests.weight_crew import Crew, Failed
from tests.weight_roles import Setting, TransportName

MISSING = nixl_transport.unavailable()


def on_all(*slow: TransportName) -> pytest.MarkDecorator:
    """The test with every transport; with those in `slow` only in the long run."""
    skip = pytest.mark.skipif(bool(MISSING), reason=MISSING)
    names: tuple[TransportName, ...] = get_args(TransportName)
    marks = {n: [skip] * (n == "nixl") + [pytest.mark.slow] * (n in slow) for n in names}
    return pytest.mark.parametrize("transport", [pytest.param(n, marks=marks[n]) for n in names])


Start = Callable[..., Crew]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    crews: list[Crew] = []
    url = f"shm://test-{uuid4().hex}"

    def begin(transport: TransportName, *, ranks: int = 2, bound_s: float = 20.0) -> Crew:
        place = url if transport == "shm" else f"file://{tmp_path}/weights"
        setting = Setting(transport, place, Parallelism(fsdp=ranks), bound_s=bound_s)
        crews.append(Crew(setting, tmp_path))
        return crews[-1]

    yield begin
    for crew in crews:
        crew.end()
    destroy(url)


@on_all()
def test_receivers_of_all_kinds_take_version_after_version_and_the_late_one_the_newest(
    start: Start, transport: TransportName
) -> None:
    crew = start(transport)
    early = crew.receivers("tp1-0/0", "tp2-0/0", "tp2-0/1")
    for version in (0, 1, 4):
        crew.all_senders("publish", version, version)
        for receiver in early:
            receiver.tell("take", version - 1)
        assert [receiver.answer() for receiver in early] == [version] * 3
        assert all(receiver.ask("holds", version) for receiver in early)
    assert crew.report(4) == (("tp1-0/0", "tp2-0/0", "tp2-0/1"), {})
    (late,) = crew.receivers("tp1-1/0")
    assert late.ask("newest", -1, 0.0) == 4
    assert late.ask("newest", 4, 0.0) is None
    assert late.ask("take") == 4
    assert late.ask("holds", 4)
    late.ask("close")
    assert crew.report(4, ["tp1-9/0"], 0.1) == (
        ("tp1-0/0", "tp2-0/0", "tp2-0/1"), {"tp1-9/0": "it has not joined"},
    )  # fmt: skip


@on_all()
def test_a_receiver_that_answers_with_an_error_is_named_and_can_take_the_same_version_again(
    start: Start, transport: TransportName
) -> None:
    crew = start(transport)
    well, ill = crew.receivers("tp1-0/0", "tp2-0/1")
    crew.all_senders("publish", 0, 0)
    assert well.ask("take") == 0
    with pytest.raises(Failed, match="RuntimeError: out of memory"):
        ill.ask("take", -1, "raise")
    assert crew.report(0) == (("tp1-0/0",), {"tp2-0/1": "RuntimeError: out of memory, for instance"})
    with pytest.raises(Failed, match=r"WeightError: .*\[\d+:\d+.*\].* does not hold what was sent|holds"):
        ill.ask("take", -1, "flip")
    _, failed = crew.report(0)
    assert "WeightError" in failed["tp2-0/1"]
    with pytest.raises(Failed, match="received: 0 of 15 tensors; no place for lm_head"):
        ill.ask("take", -1, "", True)
    assert "0 of 15 tensors" in crew.report(0)[1]["tp2-0/1"]
    assert ill.ask("take") == 0
    assert ill.ask("holds", 0)
    assert crew.report(0) == (("tp1-0/0", "tp2-0/1"), {})


@on_all()
def test_a_receiver_that_dies_is_named_and_the_others_go_on(start: Start, transport: TransportName) -> None:
    crew = start(transport)
    well, ill = crew.receivers("tp1-0/0", "tp2-0/1")
    crew.all_senders("publish", 0, 0)
    ill.tell("take", -1, "kill")
    ill.process.join(10)
    assert well.ask("take") == 0
    taken, failed = crew.report(0, timeout_s=1.0)
    # An object store can't tell a dead receiver from a silent one.
    why = "no answer within 1.0 s" if transport == "store" else "its process has died"
    assert (taken, failed) == (("tp1-0/0",), {"tp2-0/1": why})
    begun = time.monotonic()
    for version in (1, 2, 3):
        assert crew.all_senders("publish", version, version) == [(), ()]
    assert time.monotonic() - begun < 15  # nobody waited for the dead one, which has a bound of 20 s
    assert well.ask("take", 2) == 3
    assert well.ask("holds", 3)


@on_all("nixl", "gloo")
def test_a_receiver_that_hangs_costs_the_bound_once_and_learns_that_it_was_overtaken(
    start: Start, transport: TransportName
) -> None:
    crew = start(transport, bound_s=1.0)
    well, ill = crew.receivers("tp1-0/0", "tp2-0/1")
    crew.all_senders("publish", 0, 0)
    ill.tell("take", -1, "stop")
    assert well.ask("take") == 0
    taken, failed = crew.report(0, timeout_s=1.2)
    assert (taken, failed) == (("tp1-0/0",), {"tp2-0/1": "no answer within 1.2 s"})
    overtaken = [crew.all_senders("publish", version, version) for version in (1, 2, 3, 4)]
    assert [names for names in overtaken if names[0]] == [[("tp2-0/1",), overtaken[1][1]]]
    assert well.ask("take", 3) == 4
    ill.signal(signal.SIGCONT)
    with pytest.raises(Failed, match="StaleWeights"):
        ill.answer()
    assert ill.ask("take") == 4
    assert ill.ask("holds", 4)


@on_all("nixl")
def test_a_version_in_use_is_not_overwritten(start: Start, transport: TransportName) -> None:
    crew = start(transport)
    (slow,) = crew.receivers("tp1-0/0")
    crew.all_senders("publish", 0, 0)
    slow.tell("take", -1, "hold")
    time.sleep(0.35)
    for version in (1, 2, 3):
        assert crew.all_senders("publish", version, version) == [(), ()]
    assert slow.answer() == 0
    assert slow.ask("holds", 0)
    assert slow.ask("take", 0) == 3


@on_all("nixl")
def test_nothing_is_announced_that_has_not_changed_or_that_one_rank_could_not_pack(
    start: Start, transport: TransportName
) -> None:
    crew = start(transport)
    (receiver,) = crew.receivers("tp1-0/0")
    crew.all_senders("publish", 0, 0)
    for arguments, message in (
        ((1, 0), r"WeightError: version 1 is not announced: all \d+ parts .* to version 0"),
        (
            (1, 1, True, 1),
            r"rank 1: WeightError: published: 20 of 21 tensors; no place for model\.norm\.weight",
        ),
        ((0, 1), "ValueError: version 0 after version 0"),
    ):
        for sender in crew.senders:
            sender.tell("publish", *arguments)
        for sender in crew.senders:
            with pytest.raises(Failed, match=message):
                sender.answer()
    assert receiver.ask("newest", 0, 0.2) is None
    crew.all_senders("publish", 1, 0, False)
    assert receiver.ask("take") == 1
    assert receiver.ask("holds", 0)


@on_all("gloo", "nixl", "store")
def test_receivers_of_a_trainer_at_full_speed_see_whole_versions_in_order(
    start: Start, transport: TransportName
) -> None:
    crew = start(transport)
    receivers = crew.receivers("tp1-0/0", "tp2-0/0")
    for sender in crew.senders:
        sender.tell("publish_for", 1.0, 0)
    time.sleep(0.2)
    for receiver in receivers:
        receiver.tell("take_all", 3)
    assert min(receiver.answer() for receiver in receivers) >= 1
    last = crew.senders[0].answer()
    assert crew.senders[1].answer() == last
    assert last > 3
    for receiver in receivers:
        assert receiver.ask("take") == last
        assert receiver.ask("holds", last)


@on_all("nixl")
def test_a_receiver_whose_sender_dies_is_told_within_its_bound(
    start: Start, transport: TransportName
) -> None:
    crew = start(transport)
    (receiver,) = crew.receivers("tp1-0/0")
    crew.all_senders("publish", 0, 0)
    assert receiver.ask("take") == 0
    for sender in crew.senders:
        sender.signal(signal.SIGKILL)
        sender.process.join()
    if transport in ("shm", "store"):  # what is published outlives its sender
        assert receiver.ask("take") == 0
        assert receiver.ask("newest", 0, 0.1) is None
    else:
        with pytest.raises(Failed, match=r"SenderGone: source rank 0 at 127\.0\.0\.1:\d+"):
            receiver.ask("take")
