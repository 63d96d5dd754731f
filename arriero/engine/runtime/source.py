"""A source, running: its records are admitted by the gate, and held-out prompts go along at their versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, cast

from arriero.engine.graph import Evaluation, Graph, HasEvaluation, HasLimit
from arriero.engine.rates import windows
from arriero.engine.runtime.gate import Gate
from arriero.engine.runtime.journal import record
from arriero.engine.runtime.node import NodeRunner
from arriero.engine.stream import Stream
from arriero.schemas.ledger import Admitted
from arriero.schemas.messages import Dropped, Prompt, Record


class SourceRunner(NodeRunner):
    """Runs a node without inputs. Record k gets origin k; held-out prompts count down from -1.

    Held-out prompts are sent at version 0 (training waits for them: that is `accuracy_before`), at every
    multiple of `Evaluation.every`, and at the last version that whole batches reached.
    """

    async def _drive(self, streams: dict[str, Stream[Any]]) -> None:
        mine = tuple(w for w in windows(self.spec) if self.node.name in w.sources)
        gate = Gate(self.broker, mine, steps(self.graph, tuple(w.producer for w in mine)))
        tasks = [asyncio.create_task(gate.follow()), asyncio.create_task(self._wake_at_end(gate))]
        component = self.node.component
        evaluation = component.evaluation() if mine and isinstance(component, HasEvaluation) else None
        self._held_out_sent = 0
        self.clock.start()
        try:
            await self._evaluate(evaluation, 0)
            await self._until(gate, lambda: not gate.evaluating, lambda: "the held-out prompts of version 0")
            admitted = await self._admit_all(gate, evaluation)
            last = gate.whole_versions(admitted)
            await self._until(gate, lambda: gate.version >= gate.whole_versions(admitted), lambda: f"version {last}")
            await self._evaluate(evaluation, gate.version)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _admit_all(self, gate: Gate, evaluation: Evaluation | None) -> int:
        """Send records until the component has no more, or nobody wants more; how many were sent."""
        k, evaluated = 0, 0
        async with aclosing(cast("AsyncGenerator[Record, None]", self.node.component.run())) as outputs:
            async for output in outputs:
                if isinstance(output, Dropped):
                    raise ValueError(f"{self.node.name} is a source and has nothing to drop")
                await self._until(gate, lambda: gate.finished or gate.open_for(k), lambda: gate.state(k))  # noqa: B023
                if gate.finished or self.progress.sinks_ended.is_set():
                    break
                if evaluation and evaluation.every and gate.version // evaluation.every > evaluated:
                    evaluated = gate.version // evaluation.every
                    await self._evaluate(evaluation, evaluated * evaluation.every)
                await self._send(output, origin=k, min_version=gate.min_version(k))
                k += 1
        return k

    async def _evaluate(self, evaluation: Evaluation | None, version: int) -> None:
        for prompt in evaluation.prompts if evaluation else ():
            self._held_out_sent += 1
            sent = prompt.model_copy(update={"id": f"{prompt.id}@{version}", "split": "eval"})
            await self._send(sent, origin=-self._held_out_sent, min_version=version)

    async def _send(self, output: Record, *, origin: int, min_version: int) -> None:
        """Record the admission, then publish: what is on an edge is always accounted for."""
        output = output.stamped(id=output.id or f"{self.node.name}-{origin}", parents=(), origins=(origin,))
        prompt = output if isinstance(output, Prompt) else None
        if prompt is not None:
            output = prompt = prompt.model_copy(update={"min_version": min_version})
        event = Admitted(
            id=output.id, origin=origin, split=prompt.split if prompt else "train", epoch=prompt.epoch if prompt else 0,
            row=prompt.row if prompt else 0, min_version=min_version,
        )  # fmt: skip
        await record(self.broker, event)
        await self.give(output, ())

    async def _until(self, gate: Gate, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `done`, or until all sinks have ended and nobody wants records any more."""
        while not (done() or gate.finished or self.progress.sinks_ended.is_set()):
            gate.changed.clear()
            await self.clock.wait(gate.changed.wait(), what())

    async def _wake_at_end(self, gate: Gate) -> None:
        await self.progress.sinks_ended.wait()
        gate.changed.set()


def steps(graph: Graph, producers: tuple[str, ...]) -> int | None:
    """The number of versions after which the first of the loops' producers stops; None if none says so."""
    components = [graph.nodes[name].component for name in producers]
    limits = [c.limit() for c in components if isinstance(c, HasLimit)]
    return min((n for n in limits if n is not None), default=None)
