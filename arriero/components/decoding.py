"""Continuous batching over the forward pass of any Hugging Face causal language model.

One `step` gives every running request one token. Finished requests leave at once, waiting ones enter at the
next step: a prompt that several of them share is computed once, and copied into the rows of the rest. Running
rows are kept dense (the last one moves into a gap), so that empty slots cost nothing.

Invariants, for a running row: `lengths` tokens are in the KV cache; `last` is the token after them, drawn but
not yet in the cache; its random number came from its position in the sequence, so a response that is cut in
two and continued as a prompt draws the same numbers.

Shapes: N running rows, M requests that enter, W columns of the cache, V vocabulary, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from arriero.components.causal_lm import CausalForward, end_ids
from arriero.components.rollout_engine import Completion, Finish, Request, check_requests
from arriero.components.sampling import Sampling, StopStrings, draw, uniforms
from arriero.components.slot_cache import SlotCache


class DecodeEngine:
    """Samples responses in up to `slots` rows at once; each takes up to `max_length` tokens, prompt included.

    The model moves to `device` and to evaluation mode. Whoever changes its weights in place, between steps,
    calls `set_version`; `load` does both. Running requests keep the keys and values of the old weights unless
    `recompute` is called. Not safe for use by several threads at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        slots: int,
        max_length: int,
        version: int = 0,
        device: torch.device | str = "cpu",
        prefill_tokens: int = 16384,
    ) -> None:
        """`prefill_tokens`: prompt tokens, padding included, in one forward pass (but one prompt at least).

        Raises ValueError for a model that can't be run this way: see `CausalForward`.
        """
        if slots < 1 or max_length <= sampling.max_new_tokens:
            raise ValueError(
                f"slots is {slots} and max_length is {max_length}: take one slot or more, and a max_length "
                f"above max_new_tokens ({sampling.max_new_tokens}), so that a prompt fits"
            )
        self.version = version
        self._model = CausalForward(model, max_length=max_length, device=torch.device(device))
        self._cache = SlotCache(slots=slots, max_length=max_length)
        self._sampling = sampling
        self._stop = StopStrings(tokenizer, sampling.stop)
        self._ends = np.array(
            sorted(end_ids(getattr(model, "generation_config", None), model.config, tokenizer)), np.int64
        )
        self._slots = slots
        self.max_length = max_length
        self._prefill_tokens = prefill_tokens
        self._waiting: list[Request] = []
        self._running: list[Request] = []  # by row
        self._lengths = np.zeros(slots, np.int64)
        self._last = np.zeros(slots, np.int64)
        self._seeds = np.zeros(slots, np.uint64)
        self._num_new = np.zeros(slots, np.int64)
        self._limits = np.zeros(slots, np.int64)
        self._token_ids = np.zeros((slots, sampling.max_new_tokens), np.int32)
        self._logprobs = np.zeros((slots, sampling.max_new_tokens), np.float32)
        self._versions = np.zeros((slots, sampling.max_new_tokens), np.int32)

    def room(self) -> int:
        """How many requests may be added now."""
        return self._slots - len(self._running) - len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits: `step` would do nothing."""
        return not self._running and not self._waiting

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests up at the next step. Raises ValueError, taking none, if one can't run."""
        check_requests(
            requests,
            running=[request.key for request in (*self._running, *self._waiting)],
            room=self.room(),
            max_length=self.max_length,
            most=self._sampling.max_new_tokens,
        )
        self._waiting.extend(requests)

    @torch.inference_mode()
    def cancel(self, key: str) -> None:
        """Forget a request; one that is unknown or finished is no error."""
        self._waiting = [request for request in self._waiting if request.key != key]
        rows = [row for row, request in enumerate(self._running) if request.key == key]
        self._remove(np.array(rows, np.int64))

    def forget_cache(self) -> None:
        """Give back the memory of the KV cache; only while idle."""
        assert self.idle, "rows in use need their keys and values"
        self._cache = SlotCache(slots=self._slots, max_length=self.max_length)

    def set_version(self, version: int) -> None:
        """Mark the tokens from now on as sampled by weights `version`."""
        self.version = version

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights into the model. Raises ValueError, copying none, unless names and shapes agree."""
        own = self._model.state()
        given = {own[name].data_ptr() for name in state if name in own}
        missing = [
            name for name, tensor in own.items() if tensor.data_ptr() not in given
        ]  # tied: once is enough
        wrong = [name for name, new in state.items() if name not in own or own[name].shape != new.shape]
        if missing or wrong:
            raise ValueError(
                f"weights {version} are not those of this model: missing {missing}, unknown or of another "
                f"shape {wrong}; send its whole state_dict"
            )
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)
        self.version = version

    @torch.inference_mode()
    def recompute(self) -> None:
        """Compute the keys and values of all running requests again, with the weights of now."""
        if self._running:
            in_cache: list[NDArray[np.int64]] = []
            for row, request in enumerate(self._running):
                drawn = self._token_ids[row, : self._num_new[row] - 1].tolist()
                in_cache.append(np.array([*request.prompt_ids, *drawn], np.int64))
            self._prefill(in_cache, np.arange(len(in_cache)))

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One token for every running request, the first one for those that waited; gives what ended."""
        logits = [self._decode()] if self._running else []
        if self._waiting:
            logits.append(self._admit())
        return self._draw(torch.cat(logits)) if logits else []

    def _decode(self) -> Tensor:
        """Logits [N, V] after the last token of all running rows."""
        num_rows = len(self._running)
        lengths_N = self._lengths[:num_rows]
        self._cache.rows = num_rows
        self._cache.advance(int(lengths_N.max()))
        lengths_N += 1
        end = self._cache.end
        columns_W = torch.arange(self._cache.columns, device=self._model.device)
        visible_NW = (columns_W >= self._model.tensor(end - lengths_N)[:, None]) & (columns_W < end)
        return self._model.next(self._last[:num_rows], lengths_N - 1, visible_NW, self._cache)

    def _admit(self) -> Tensor:
        """Move waiting requests into rows; logits [M, V] after their prompts."""
        requests, self._waiting = self._waiting, []
        rows_M = np.arange(len(self._running), len(self._running) + len(requests))
        self._running.extend(requests)
        self._lengths[rows_M] = [len(request.prompt_ids) for request in requests]
        self._seeds[rows_M] = np.array([request.seed for request in requests], np.uint64)
        self._num_new[rows_M] = 0
        self._limits[rows_M] = [
            request.max_new_tokens or self._sampling.max_new_tokens for request in requests
        ]
        return self._prefill([np.asarray(request.prompt_ids, np.int64) for request in requests], rows_M)

    def _prefill(self, sequences: list[NDArray[np.int64]], rows_M: NDArray[np.int64]) -> Tensor:
        """Fill cache row `rows_M[i]` from sequence i, equal ones computed once; logits [M, V] after each."""
        distinct: dict[bytes, list[int]] = {}
        for i, sequence in enumerate(sequences):
            distinct.setdefault(sequence.tobytes(), []).append(i)
        groups = sorted(distinct.values(), key=lambda group: len(sequences[group[0]]))
        staying = np.delete(self._lengths[: len(self._running)], rows_M)
        self._cache.fit(len(sequences[groups[-1][0]]), width=int(staying.max(initial=0)))
        logits: list[Tensor] = []
        order: list[int] = []
        while groups:
            size = 1
            while size < len(groups) and (size + 1) * len(sequences[groups[size][0]]) <= self._prefill_tokens:
                size += 1
            together, groups = groups[:size], groups[size:]
            logits_BV, computed = self._model.prompt([sequences[group[0]] for group in together])
            members = [i for group in together for i in group]
            source = self._model.tensor(np.repeat(np.arange(size), [len(group) for group in together]))
            self._cache.write(computed, source, self._model.tensor(rows_M[members]))
            logits.append(logits_BV[source])
            order += members
        return torch.cat(logits)[self._model.tensor(np.argsort(order))]

    def _draw(self, logits_NV: Tensor) -> list[Completion]:
        """Draw and record one token per row; take out the rows that ended."""
        num_rows = len(self._running)
        rows_N, num_new_N = np.arange(num_rows), self._num_new[:num_rows]
        uniform_N = self._model.tensor(uniforms(self._seeds[:num_rows], self._lengths[:num_rows]))
        greedy = [request.greedy for request in self._running]
        greedy_N = self._model.tensor(np.array(greedy)) if any(greedy) else None
        drawn = torch.stack([each.double() for each in draw(logits_NV, uniform_N, self._sampling, greedy_N)])
        token_N, logprob_N = drawn.cpu().numpy()  # the one transfer and wait of a step
        self._last[:num_rows] = token_N
        self._token_ids[rows_N, num_new_N] = token_N
        self._logprobs[rows_N, num_new_N] = logprob_N
        self._versions[rows_N, num_new_N] = self.version
        bad_N = ~np.isfinite(logprob_N)
        num_new_N += ~bad_N
        stopped_N = np.isin(self._last[:num_rows], self._ends)
        if self._sampling.stop:
            for row in np.flatnonzero(~bad_N & ~stopped_N):
                stopped_N[row] = self._stop(self._end_of_response(int(row)))
        ended = np.flatnonzero(bad_N | stopped_N | (num_new_N >= self._limits[:num_rows]))
        done = [
            self._completion(row, "error" if bad_N[row] else "stop" if stopped_N[row] else "length")
            for row in ended.tolist()
        ]
        if bad_N.any():
            self._cache.clear(self._model.tensor(np.flatnonzero(bad_N)))
        self._remove(ended)
        return done

    def _end_of_response(self, row: int) -> NDArray[np.int32]:
        """At least as many of the last tokens as a stop string may reach over."""
        drawn, request = self._token_ids[row, : self._num_new[row]], self._running[row]
        before = min(request.sampled, max(self._stop.window - len(drawn), 0))
        if not before:
            return drawn
        return np.concatenate([np.asarray(request.prompt_ids[-before:], np.int32), drawn])

    def _completion(self, row: int, finish: Finish) -> Completion:
        used = slice(0, self._num_new[row])
        return Completion(
            key=self._running[row].key,
            token_ids=self._token_ids[row, used].copy(),
            logprobs=self._logprobs[row, used].copy(),
            versions=self._versions[row, used].copy(),
            finish=finish,
        )

    def _remove(self, rows: NDArray[np.int64]) -> None:
        """Take rows out; the last ones that stay move into the gaps."""
        num_left = len(self._running) - len(rows)
        gaps = rows[rows < num_left]
        if len(gaps):
            movers = np.setdiff1d(np.arange(num_left, len(self._running)), rows)
            width = int(self._lengths[movers].max())
            self._cache.copy_rows(self._model.tensor(movers), self._model.tensor(gaps), width=width)
            for state in (self._lengths, self._last, self._seeds, self._num_new, self._limits):
                state[gaps] = state[movers]
            for record in (self._token_ids, self._logprobs, self._versions):
                record[gaps] = record[movers]
            for gap, mover in zip(gaps.tolist(), movers.tolist(), strict=True):
                self._running[gap] = self._running[mover]
        del self._running[num_left:]
