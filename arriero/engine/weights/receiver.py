"""The receiving end: a version of the weights into tensors that exist already, verified by reading them back.

consumes    a manifest, and the senders' plan
produces    its shards, or whole tensors, in place
waits for   the transport, bounded
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from typing import Protocol

from torch import Tensor

from arriero.engine.weights.copying import Bytes, Staging
from arriero.engine.weights.layout import SenderGone, StaleWeights, WeightError
from arriero.engine.weights.live_layout import whole_layout
from arriero.engine.weights.plan import Landing, Plan
from arriero.engine.weights.sender import TASK_BYTES, all_results, default_threads
from arriero.engine.weights.shards import (
    Remembered,
    check_shards,
    check_writable,
    landing_spans,
    receive_span,
)
from arriero.engine.weights.transport import Inlet, Span
from arriero.schemas.layouts import RankLayout
from arriero.schemas.weights import WeightManifest

_ARRIVED_BYTES = 4 << 20  # that are verified together: to wake a thread for each tensor would cost as much


class Receives(Protocol):
    """Fills tensors with a version, and verifies it."""

    def receive(self, manifest: WeightManifest, into: Mapping[str, Tensor]) -> None: ...


class ShardReceiver:
    """One receiver rank's end. `layout` is what it stores; without it, every tensor that is sent, whole."""

    def __init__(self, inlet: Inlet, layout: RankLayout | None = None, *, threads: int | None = None) -> None:
        self._inlet, self.layout = inlet, layout
        self._plan: Plan | None = None
        self._threads = ThreadPoolExecutor(threads or default_threads(), "arriero-land")
        self._staging = Staging()
        self._spans = Remembered(self._to_land)

    def newest(self, after: int = -1, wait_s: float = 0.0) -> WeightManifest | None:
        """The newest version beyond `after`, also for a receiver that has just joined; None if none comes."""
        return self._inlet.newest(after, wait_s)

    def receive(self, manifest: WeightManifest, into: Mapping[str, Tensor]) -> None:
        """Fill existing tensors, in place, and read every one of them back.

        Floats are cast to the dtype of `into`. Raises StaleWeights if the version was overwritten: take the
        newest; SenderGone if there is nobody to have it from; WeightError, naming the tensor or the count,
        for everything else. Nothing is written if names or shapes don't fit; after an error in the middle,
        `into` is a mix of versions.
        """
        try:
            self._receive(manifest, into)
        except (StaleWeights, SenderGone):
            raise  # no outcome: it takes another version next, or nobody hears of it
        except Exception as error:
            self.failed(manifest.version, f"{type(error).__name__}: {error}")
            raise
        with suppress(SenderGone):  # what we have is verified all the same
            self._inlet.report(manifest.version, "")

    def catch_up(
        self, into: Mapping[str, Tensor], after: int = -1, wait_s: float = 0.0
    ) -> WeightManifest | None:
        """Receive the newest version beyond `after`, the next one if it is overwritten meanwhile.

        None if there is none within `wait_s`, or if the sender was faster for so long.
        """
        until = time.monotonic() + wait_s
        while True:
            manifest = self.newest(after, max(until - time.monotonic(), 0))
            if manifest is None:
                return None
            try:
                self.receive(manifest, into)
            except StaleWeights:
                if time.monotonic() >= until:
                    return None
            else:
                return manifest

    def failed(self, version: int, error: str) -> None:
        """Tell the sender that this receiver could not take a version; `receive` does so itself."""
        self._inlet.report(version, error)

    def _receive(self, manifest: WeightManifest, into: Mapping[str, Tensor]) -> None:
        if self._plan is None or self._plan.digest != manifest.plan:
            self._plan = self._inlet.plan(manifest.session)
            self._spans.forget()
        if manifest.plan != self._plan.digest or len(manifest.cells) != len(self._plan.cells):
            raise WeightError(
                f"version {manifest.version} was packed by plan {manifest.plan}, "
                f"but its senders say {self._plan.digest}"
            )
        spans = self._spans(into)
        with ExitStack() as stack:
            stack.enter_context(self._inlet.lease(manifest, [span for span, _ in spans]))
            arriving = stack.enter_context(closing(self._inlet.fetch(manifest, [span for span, _ in spans])))
            tasks: list[Future[None]] = []
            bundle: list[tuple[Span, tuple[Landing, ...], Bytes]] = []
            bundled = 0
            try:
                for (span, landings), data in zip(spans, arriving, strict=True):
                    passing = not self._inlet.stable and data is not span.into
                    if passing or self._inlet.carried:  # no thread is woken for what needs none
                        self._land(manifest, into, [(span, landings, data)])
                        continue
                    bundle.append((span, landings, data))
                    bundled += span.nbytes
                    # What is there already goes in large parts; what arrives while it is in the cache.
                    if bundled >= (TASK_BYTES if self._inlet.stable else _ARRIVED_BYTES):
                        tasks.append(self._threads.submit(self._land, manifest, into, bundle))
                        bundle, bundled = [], 0
                tasks.append(self._threads.submit(self._land, manifest, into, bundle))
            finally:
                wait(tasks)  # none writes behind our back
            all_results(tasks)
        self._spans.check(into)

    def _land(
        self,
        manifest: WeightManifest,
        into: Mapping[str, Tensor],
        arrived: Sequence[tuple[Span, tuple[Landing, ...], Bytes]],
    ) -> None:
        for span, landings, data in arrived:
            receive_span(manifest, span, landings, data, into, self._staging)

    def _to_land(self, into: Mapping[str, Tensor]) -> list[tuple[Span, tuple[Landing, ...]]]:
        assert self._plan is not None, "a plan comes first"
        layout = self.layout or whole_layout(self._plan, into)
        check_shards(layout, into, "received", cast=True)
        check_writable(into)
        return landing_spans(self._plan.landings(layout), into)

    def close(self) -> None:
        self._threads.shutdown()
        self._inlet.close()


class Standby:
    """A second set of parameters: a version arrives in it while the first one is used, and then they change.

    `prepare` may run in another thread than the model. `switch` only exchanges the memory of each parameter
    (microseconds), so the generator stands still for that long; parameters that something else holds by
    address, a captured graph for instance, need `receive` into themselves instead. Two names of one parameter
    (tied) stay so.
    """

    def __init__(self, receiver: Receives, parameters: Mapping[str, Tensor]) -> None:
        self._receiver, self._parameters = receiver, dict(parameters)
        fresh = {id(p): p.detach().clone() for p in parameters.values()}
        self._spare = {name: fresh[id(p)] for name, p in parameters.items()}
        self.ready: int | None = None  # the version that `switch` would put in use

    def prepare(self, manifest: WeightManifest) -> None:
        """Receive and verify a version; the parameters in use are not touched, also by an error."""
        self.ready = None
        self._receiver.receive(manifest, self._spare)
        self.ready = manifest.version

    def switch(self) -> int:
        """Use the prepared version; its number. AssertionError if `prepare` has not succeeded."""
        assert self.ready is not None, "prepare a version before each switch"
        before: dict[int, Tensor] = {}
        for name, parameter in self._parameters.items():
            if id(parameter) not in before:
                before[id(parameter)] = parameter.data
                parameter.data = self._spare[name]
            self._spare[name] = before[id(parameter)]
        version, self.ready = self.ready, None
        return version
