"""Seconds of generation: decoding steps that depend on the batch, and what a long tail makes of them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from arriero.engine.planner.hardware import BYTES, Hardware, Precision
from arriero.engine.planner.lengths import Lengths
from arriero.engine.planner.memory import resident_tokens
from arriero.engine.planner.models import ModelShape


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One generator replica over `tp` devices, at most `slots` sequences at once.

    `overhead_s` is added to every decoding step: scheduling, sampling, an engine without captured graphs.
    `sharing` sequences have one prompt, taken in once.
    """

    model: ModelShape
    hardware: Hardware
    tp: int = 1
    precision: Precision = "bf16"
    slots: int = 256
    overhead_s: float = 0.0
    sharing: int = 1

    def step(self, batch: float, context: float) -> float:
        """Seconds for one token of each of `batch` sequences that hold `context` tokens together."""
        m, h = self.model, self.hardware
        read = (
            (m.params * BYTES[self.precision] + context * m.cache_bytes(self._cache)) / self.tp / h.bandwidth
        )
        operations = batch * m.forward_flops(context / max(batch, 1)) / self.tp / h.rate(self.precision)
        size = batch * m.hidden * 2
        reduce = 2 * h.latency(self.tp) + 4 * size * (self.tp - 1) / self.tp / h.between(self.tp)
        return max(read, operations) + m.layers * (h.kernel_s + reduce) + self.overhead_s

    def read(self, tokens: float) -> float:
        """Seconds to take in a sequence of `tokens` tokens."""
        rate = self.hardware.rate(self.precision) * self.tp
        return tokens * self.model.forward_flops(tokens / 2) / rate

    def prefill(self, prompt: float) -> float:
        """Seconds to take in the prompt of one sequence: its part of a prompt that several share."""
        return self.read(prompt) / self.sharing

    def per_token(self, batch: int, tokens: float) -> float:
        """StreamRL's per-token latency: seconds between two tokens of a sequence at this batch."""
        return self.step(batch, batch * tokens)

    def tokens_per_second(self, prompt: float, responses: Lengths, slots: int | None = None) -> float:
        """Sampled tokens per second of a replica that always has `slots` sequences under way."""
        n = slots or self.slots
        step = self.step(n, n * resident_tokens(prompt, responses))
        return 1.0 / (step / n + self.prefill(prompt) / responses.mean)

    def makespan(self, lengths: Sequence[float], prompt: float) -> float:
        """Seconds from an empty replica until all of `lengths` are sampled, in the order given."""
        return max(self.finishes(lengths, prompt), default=0.0)

    def finishes(self, lengths: Sequence[float], prompt: float) -> list[float]:
        """When each sequence ends. A place that becomes free is given to the next in order at once."""
        waiting = deque(enumerate(lengths))
        active: list[tuple[float, int, float]] = []  # position at which it ends, index, length
        ends = [0.0] * len(lengths)
        now = position = context = 0.0
        while waiting or active:
            while waiting and len(active) < self.slots:
                index, length = waiting.popleft()
                heapq.heappush(active, (position + length, index, length))
                context += prompt
                now += self.prefill(prompt)
            until = active[0][0]
            steps, batch = until - position, len(active)
            now += steps * self.step(batch, context + batch * steps / 2)
            context += batch * steps
            position = until
            while active and active[0][0] <= position:
                _, index, length = heapq.heappop(active)
                ends[index] = now
                context -= prompt + length
        return ends

    @property
    def _cache(self) -> int:
        return BYTES[self.precision] if self.precision == "fp32" else 2


def longest_first(lengths: Sequence[float]) -> list[float]:
    """Order in which a replica ends earliest if lengths are known: longest processing time first."""
    return sorted(lengths, reverse=True)
