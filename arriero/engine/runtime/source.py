"""A source, running: its records are admitted by the gate; held-out prompts go along at their versions.

One that starts again draws its records from the first on, passes over those that the ledger has settled and
sends those again that are under way: under the same ids, so that what is still on the edge is there once.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

from arriero.engine.errors import UserError
from arriero.engine.graph import EvaluatesDuring, Evaluation, Graph, HasEvaluation, HasLimit
from arriero.engine.rates import windows
from arriero.engine.runtime.gate import Gate
from arriero.engine.runtime.history import History
from arriero.engine.runtime.node import NodeRunner
from arriero.schemas.ledger import Admitted
from arriero.schemas.messages import Dropped, Prompt, Record, ScoredGroup

_log = logging.getLogger(__name__)


class SourceRunner(NodeRunner):
    """Runs a node without inputs. Record k gets origin k; held-out prompts count down from -1.

    Held-out prompts are sent at version 0 (training waits for them: that is `accuracy_before`), at every
    multiple of `evaluates_every`, and at the last version that whole batches reached. Each is to be sampled
    by exactly that version. An evaluation that is due while the one before is under way is left out, and
    counted: the weight plane keeps the versions of two, and more would only pile up.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mine = tuple(w for w in windows(self.spec) if self.node.name in w.sources)
        self._gate = Gate(mine, steps(self.graph, tuple(w.producer for w in mine)))
        self.history = History(
            self.node.name, self.context.replica, self.broker, [self._gate.apply], source=True
        )
        component = self.node.component
        self._evaluates = component if mine and isinstance(component, HasEvaluation) else None
        self._evaluation: Evaluation | None = None
        self._every = component.evaluates_every() if mine and isinstance(component, EvaluatesDuring) else 0
        self._evaluated = -1  # the last version for which held-out prompts were sent
        self._left_out = -1  # the last version that was due too early
        self._held_out_sent = 0
        self._last_held_out = 0  # the origin of the last held-out prompt
        self._next = 0  # the number of the next record
        self.context = replace(self.context, measured=self._measured)

    @property
    def _remembers(self) -> bool:
        return True

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        return [self.history.follow(), self._wake_at_end()]

    async def _drive(self, streams: dict[str, Any]) -> None:
        gate = self._gate
        if self._evaluates is not None:
            self._evaluation = await self._evaluates.evaluation()
        self.clock.start()
        held_out = [a for a in self.history.admitted.values() if a.split == "eval"]
        self._held_out_sent = len(held_out)
        self._last_held_out = min([0, *(a.origin for a in held_out)])
        for version in sorted({a.min_version for a in held_out}):
            await self._evaluate(version)
        await self._evaluate(0)
        await self._until(
            lambda: gate.held_out_back >= self._held_out_sent, lambda: "the held-out prompts of version 0"
        )
        admitted = await self._admit_all()
        await self._until(
            lambda: gate.version >= gate.whole_versions(admitted),
            lambda: f"version {gate.whole_versions(admitted)}",
        )
        await self._evaluate(gate.version)

    async def _admit_all(self) -> int:
        """Send records until the component has no more, or nobody wants more; how many were sent."""
        gate, k, first_epoch, admitted = self._gate, 0, 0, self.history.admitted
        async with aclosing(cast("AsyncGenerator[Record, None]", self.node.component.run())) as outputs:
            while True:
                # Those too that were admitted before a run went back to older versions: sent at once they
                # would stand in the way of what these versions need.
                if k not in admitted or not gate.open_for(k):
                    # The gate first: what a record is may depend on the versions that are there by then.
                    await self._until(lambda: gate.open_for(k), lambda: gate.state(k))  # noqa: B023
                if gate.finished or self.progress.sinks_ended.is_set():
                    break
                self._next = k
                if (output := await anext(outputs, None)) is None:
                    break
                if isinstance(output, Dropped):
                    raise ValueError(f"{self.node.name} is a source and has nothing to drop")
                first_epoch += not _place(output)[0]
                if _place(output)[0] and (why := gate.hopeless(first_epoch)):
                    raise UserError(f"{self.node.name}: {why}")
                if k not in admitted:
                    await self._send(output, origin=k, min_version=gate.min_version(k))
                elif k in self.history.open:
                    await self._send_again(output, admitted[k])
                k += 1
        return k

    async def _send_again(self, output: Record, before: Admitted) -> None:
        """What may have been lost between the ledger and the edge, or with all edges."""
        if output.id and output.id != before.id:
            raise UserError(
                f"{self.node.name}: record {before.origin} was {before.id} and now is {output.id}: its data, "
                "their order or the seed has changed since; go on with the same"
            )
        await self._send(output, origin=before.origin, min_version=before.min_version)

    def _measured(self, record: str) -> float | None:
        """The share of right rollouts of a record, as far as versions show it that are certain by now."""
        before = self.history.admitted.get(self._next)
        certain = self._gate.min_version(self._next) if before is None else before.min_version
        return self._gate.results.share(record, certain)

    async def _evaluate(self, version: int) -> None:
        """Send the held-out prompts for `version`, if they were not sent for it already."""
        if self._evaluation is None or version <= self._evaluated:
            return
        self._evaluated = version
        before = {a.id: a.origin for a in self.history.admitted.values() if a.split == "eval"}
        for prompt in self._evaluation.prompts:
            sent = prompt.model_copy(update={"id": f"{prompt.id}@{version}", "split": "eval"})
            origin = before.get(sent.id)
            if origin is None:
                self._held_out_sent += 1
                self._last_held_out -= 1
                origin = self._last_held_out
            elif origin not in self.history.open:
                continue
            await self._send(sent, origin=origin, min_version=version)

    async def _evaluate_if_due(self) -> None:
        if self._evaluation is None or not self._every or self._gate.finished:
            return
        due = self._gate.version // self._every * self._every
        if due <= max(self._evaluated, self._left_out):
            return
        if self._gate.held_out_back < self._held_out_sent and not self.context.deterministic:
            self._left_out = due
            self.clock.count("evaluations_left_out", 1)
            _log.warning(
                "version %d isn't evaluated: the evaluation of version %d takes longer than the %d versions "
                "between two; evaluate less often, or fewer prompts", due, self._evaluated, self._every,
            )  # fmt: skip
            return
        await self._evaluate(due)

    async def _send(self, output: Record, *, origin: int, min_version: int) -> None:
        """Record the admission, then publish: what is on an edge is always accounted for."""
        output = output.stamped(id=output.id or f"{self.node.name}-{origin}", parents=(), origins=(origin,))
        prompt = output if isinstance(output, Prompt) else None
        epoch, row = _place(output)
        if prompt is not None:
            output = prompt = prompt.model_copy(update={"min_version": min_version})
        event = Admitted(
            id=output.id,
            origin=origin,
            split=prompt.split if prompt else "train",
            epoch=epoch,
            row=row,
            min_version=min_version,
            source=prompt.source if prompt else "",
        )
        await self.give(output, (), first=event)

    async def _until(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `done`, or until nobody wants records any more; evaluates meanwhile when it is time."""
        while True:
            await self._evaluate_if_due()
            if done() or self._gate.finished or self.progress.sinks_ended.is_set():
                return
            self._gate.changed.clear()
            await self.clock.wait(self._gate.changed.wait(), what())

    async def _wake_at_end(self) -> None:
        await self.progress.sinks_ended.wait()
        self._gate.changed.set()


@runtime_checkable
class _OfRow(Protocol):
    """What was made of a row of a data set."""

    epoch: int
    row: int


def _place(output: Record) -> tuple[int, int]:
    """Epoch and row of what a source gives; 0 for what has none."""
    data = output.group.prompt if isinstance(output, ScoredGroup) else output
    return (data.epoch, data.row) if isinstance(data, _OfRow) else (0, 0)


def steps(graph: Graph, producers: tuple[str, ...]) -> int | None:
    """The number of versions after which the first of the loops' producers stops; None if none says so."""
    components = [graph.nodes[name].component for name in producers]
    limits = [c.limit() for c in components if isinstance(c, HasLimit)]
    return min((n for n in limits if n is not None), default=None)
