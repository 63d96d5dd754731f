"""Episodes on a decode engine: who speaks next in each of them, and what has come of it.

| an episode  | moved by                                                                 |
|-------------|--------------------------------------------------------------------------|
| is answered | its environment, in a thread: `reset`, a tool or `step`; a crash ends it |
| speaks      | the engine, until the turn ends; logits that aren't finite end it        |
| is over     | `done`, a limit, a crash; its group is given when all its episodes are   |

A later turn is a new request on the whole conversation: an engine with a prefix cache computes only what is
new, the embedded one the conversation again. The seed stays, so an episode's random numbers go on with its
positions. In a deterministic run the answers of a group are waited for before anything is decoded.
"""

# pyright: reportUnknownMemberType=false
# The tokenizers of transformers are annotated only in part.

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from arriero.components.chat import Chat, ChatMessage, opening
from arriero.components.environments.calls import Answer, Calls
from arriero.components.environments.conversation import Conversation, Finish
from arriero.components.environments.environment import Episode, Turn, Unscorable, verdict
from arriero.components.environments.tools import Toolbox
from arriero.components.group_decoding import published, request_seed
from arriero.components.packing import check_vocabulary
from arriero.components.policy import load_tokenizer, said
from arriero.components.rollout_engine import Completion, Request, open_engine
from arriero.components.verifiers.quarantine import Quarantine
from arriero.components.verifiers.version import reward_version
from arriero.engine.errors import UserError, describe
from arriero.engine.runtime.context import Context, entered
from arriero.schemas.messages import (
    Dropped,
    DropReason,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    ScoredGroup,
    Weights,
)

if TYPE_CHECKING:
    from arriero.components.environments.episodes import Episodes

log = logging.getLogger(__name__)
_WAIT_S = 0.05  # for an environment, while nothing is decoded: then the event loop may bring weights
_WAIT_BESIDE_S = 0.002  # the same, of an engine that shares its thread with another
_BARREN = 64  # episodes in a row without a verdict that end the run
_MOST_ABANDONED = 256


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """What came back from an environment: a begun episode, or the answer to a turn and who gives it."""

    episode: Episode | None = None
    turn: Turn | None = None
    role: str = "user"


@dataclass(kw_only=True, eq=False)
class _Open:
    """An episode under way. `rewards` has one for each turn of the policy that was answered."""

    key: str
    seed: int
    prompt: Prompt
    began: float = field(default_factory=time.monotonic)
    episode: Episode | None = None
    talk: Conversation | None = None
    rewards: list[float] = field(default_factory=list[float])
    cut: bool = False  # the last turn ended at the limit of tokens
    finish: Finish = "stop"
    score: Score | None = None  # once it is over
    refused: str = ""  # why it couldn't even begin: too long, or
    unscorable: bool = False  # of no use to anybody
    invalid: bool = False


class EpisodeDecoding:
    """As `GroupDecoding`, with environments. Not for several threads at once."""

    def __init__(self, config: Episodes, context: Context, *, beside: bool = False) -> None:
        self._config, self._context = config, context
        self._wait_s = _WAIT_BESIDE_S if beside else _WAIT_S
        self._toolbox = Toolbox(config.environment.tools(), chat=bool(config.generator.chat.template))
        sampling = config.generator.sampling
        stops = tuple(dict.fromkeys((*sampling.stop, *self._toolbox.stops)))
        generator = replace(config.generator, sampling=replace(sampling, stop=stops))
        self.tokenizer = load_tokenizer(generator.model)
        self._chat = Chat(self.tokenizer, generator.chat, model=generator.model)
        if generator.chat.template:
            self._chat.check_turns(roles=("user", "tool") if self._toolbox.tools else ("user",))
        self._stack = ExitStack()
        with entered(context):
            self._environment = self._stack.enter_context(config.environment.opened())
        self._reward_version = reward_version(config.environment)
        self._engine = open_engine(generator, context, self.tokenizer)
        self._limit = min(config.tokens or self._engine.max_length, self._engine.max_length)
        self._calls: Calls[_Heard] = Calls("environment")
        self._groups: dict[str, list[_Open]] = {}
        self._open: dict[str, _Open] = {}  # those that aren't over, by key
        self._ready: list[Request] = []  # turns that wait for the other answers of a deterministic run
        self._barren = 0
        self._torn = False  # a version broke off as it arrived: what is in the engine is none
        self._report = Quarantine()

    @property
    def version(self) -> int:
        """That is in use; -1 for none."""
        return -1 if self._torn else self._engine.version

    @property
    def has_room(self) -> bool:
        return len(self._open) + self._config.samples <= self._config.generator.slots

    @property
    def idle(self) -> bool:
        return not self._groups

    @property
    def evaluating(self) -> bool:
        """Whether held-out prompts are under way: then the weights have to stay."""
        return any(group[0].prompt.split == "eval" for group in self._groups.values())

    @property
    def receives_beside(self) -> bool:
        return self._engine.receives_beside

    def prepare(self, weights: Weights) -> None:
        """Receive a version beside the one in use; may run in another thread."""
        self._engine.prepare(published(weights))

    def load(self, weights: Weights) -> None:
        """Take a version; running turns go on with it."""
        if weights.version != self.version:
            self._torn = True
            self._engine.take(published(weights))
            self._torn = False

    def suits(self, prompt: Prompt) -> bool:
        """As `GroupDecoding.suits`."""
        if prompt.split == "eval":
            return self.idle or self.version == prompt.min_version
        return self.version >= prompt.min_version or not self.evaluating

    def add(self, prompt: Prompt, /) -> None:
        """Begin the episodes of a prompt; whether it fits shows when they have begun."""
        seeds = [request_seed(self._context.seed, prompt.id, n) for n in range(self._config.samples)]
        group = [_Open(key=f"{prompt.id}/{n:04}", seed=s, prompt=prompt) for n, s in enumerate(seeds)]
        self._groups[prompt.id] = group
        for one in group:
            self._open[one.key] = one
            self._calls.submit(one.key, partial(self._begun, prompt, one.seed))

    def step(self) -> list[ScoredGroup | Dropped]:
        """Hear the environments, decode one token for whoever speaks; the groups that are complete."""
        wait_s = self._wait_s if self._engine.idle or self._context.deterministic else 0.0
        for answer in self._calls.answers(wait_s=wait_s, whole=self._context.deterministic):
            if (request := self._heard(self._open[answer.key], answer)) is not None:
                self._ready.append(request)
        if not (self._context.deterministic and len(self._calls)):
            self._engine.add(sorted(self._ready, key=lambda r: r.key))
            self._ready = []
            for completion in [] if self._engine.idle else self._engine.step():
                self._said(self._open[completion.key], completion)
        self._expire()
        under_way = {o.prompt.id for o in self._open.values()}
        return [self._finished(prompt) for prompt in self._groups.keys() - under_way]

    # --- an environment has answered ----------------------------------------------------------------------

    def _heard(self, one: _Open, answer: Answer[_Heard]) -> Request | None:
        """Go on with an episode; the request of its next turn, None if it is over."""
        if answer.error is not None or answer.value is None:
            self._failed(one, answer.error)
            return None
        try:
            return self._next_turn(one, answer.value)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001  # what the environment gave can't be used: its own fault
            self._failed(one, error)
            return None

    def _next_turn(self, one: _Open, heard: _Heard) -> Request | None:
        if heard.episode is not None:
            one.episode = heard.episode
            ids = self._opening(heard.episode)
            one.talk = Conversation(ids)
            if not 0 < len(ids) < self._limit:
                one.refused = f"an opening of {len(ids)} tokens, between 1 and {self._limit - 1} fit"
                self._over(one)
                return None
            return self._request(one, one.talk)
        assert heard.turn is not None
        assert one.talk is not None
        turn, talk = heard.turn, one.talk
        if not math.isfinite(turn.reward):
            raise ValueError(f"the reward of a turn is {turn.reward}; a finite number is needed")
        one.rewards.append(float(turn.reward))
        if turn.done:
            self._over(one, right=turn.right)
            return None
        ids = self._observation(talk, turn.text, heard.role)
        if talk.turns >= self._config.turns or len(talk.token_ids) + len(ids) >= self._limit:
            one.cut = True
            self._over(one, right=turn.right)
            return None
        talk.observed(ids)
        return self._request(one, talk)

    def _opening(self, episode: Episode) -> list[int]:
        if self._config.generator.chat.template or episode.messages:
            said = opening(episode.opening, episode.messages)
            ids = self._chat.render(said, tools=self._toolbox.schemas)
        else:
            manual = f"{self._toolbox.manual}\n" if self._toolbox.tools else ""
            ids = self._chat.prompt(Prompt(text=f"{manual}{episode.opening}"))
        if (vocabulary := self._engine.vocabulary) is not None:
            check_vocabulary(ids, vocabulary, "an opening")
        return ids

    def _observation(self, talk: Conversation, text: str, role: str) -> list[int]:
        if self._config.generator.chat.template:
            message: list[ChatMessage] = [{"role": role, "content": text}]
            return self._chat.following(talk.last, message, tools=self._toolbox.schemas)
        written = self._config.observation.replace("{text}", text)
        untyped: Any = self.tokenizer
        ids: list[int] = untyped.encode(written, add_special_tokens=False)
        return ids

    def _request(self, one: _Open, talk: Conversation) -> Request:
        room = min(self._limit - len(talk.token_ids), self._config.sampling.max_new_tokens)
        return Request(key=one.key, prompt_ids=list(talk.token_ids), seed=one.seed, max_new_tokens=room)

    # --- the policy has spoken ----------------------------------------------------------------------------

    def _said(self, one: _Open, completion: Completion) -> None:
        assert one.talk is not None
        assert one.episode is not None
        if completion.finish == "error":
            one.invalid = True
            self._over(one)
            return
        one.talk.said(completion)
        one.cut = completion.finish == "length"
        text = said(self.tokenizer, completion.token_ids.tolist())
        self._calls.submit(one.key, partial(self._answered, one.episode, text))

    def _begun(self, prompt: Prompt, seed: int) -> _Heard:
        return _Heard(episode=self._environment.reset(prompt, seed=seed))

    def _answered(self, episode: Episode, text: str) -> _Heard:
        if calls := self._toolbox.calls(text):
            return _Heard(turn=Turn(text=self._toolbox.answer(calls)), role="tool")
        return _Heard(turn=episode.step(text))

    # --- an episode is over -------------------------------------------------------------------------------

    def _failed(self, one: _Open, error: BaseException | None) -> None:
        if isinstance(error, Unscorable):
            one.refused, one.unscorable = f"quarantined: {error}"[:500], True
            with entered(self._context):
                self._report.tell([(one.prompt, str(error))])
            self._over(one, score=Score(value=0.0, outcome=Outcome.WRONG))
            return
        detail = describe(error)[:300] if error is not None else "it gave no answer"
        self._context.count("episodes_error", 1)
        log.warning("episode %s: the environment failed: %s", one.key, detail, exc_info=error)
        self._over(one, score=Score(value=0.0, outcome=Outcome.ERROR, detail=detail))

    def _expire(self) -> None:
        limit = self._config.seconds
        for one in [o for o in self._open.values() if time.monotonic() - o.began > limit]:
            self._context.count("episodes_timeout", 1)
            who = "its environment" if one.key in self._calls else "the policy"
            detail = f"more than {limit:g} s, in the end waiting for {who}"
            self._over(one, score=Score(value=0.0, outcome=Outcome.TIMEOUT, detail=detail))
        if (hanging := self._calls.abandoned) > _MOST_ABANDONED:
            raise UserError(
                f"{hanging} calls of the environment were given up after {limit:g} s and don't end"
            )

    def _over(self, one: _Open, *, score: Score | None = None, right: bool | None = None) -> None:
        hanging = one.key in self._calls
        self._calls.forget(one.key)
        self._engine.cancel(one.key)
        self._ready = [r for r in self._ready if r.key != one.key]
        del self._open[one.key]
        if score is None:
            score = verdict(one.rewards, right)
        one.score, one.finish = score, "length" if one.cut else "stop"
        if one.episode is not None and not hanging:
            closing = f"{one.key} closes"
            self._calls.submit(closing, partial(_closed, one.episode))
            self._calls.forget(closing)
        self._judge_run(one, score)

    def _judge_run(self, one: _Open, score: Score) -> None:
        """UserError after many episodes in a row from which nothing can be learned."""
        barren = one.invalid or score.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
        self._barren = self._barren + 1 if barren else 0
        if self._barren >= _BARREN:
            why = "its log-probabilities aren't finite; lower optimizer.lr" if one.invalid else score.detail
            raise UserError(f"{self._barren} episodes in a row without a verdict; the last: {why}")

    def _finished(self, prompt_id: str) -> ScoredGroup | Dropped:
        group = self._groups.pop(prompt_id)
        if refused := next((o for o in group if o.refused), None):
            reason: DropReason = "invalid" if refused.unscorable else "too_long"
            return Dropped(parent=prompt_id, reason=reason, detail=refused.refused)
        valid = [o for o in group if not o.invalid]
        if invalid := len(group) - len(valid):
            self._context.count("invalid_rollouts", invalid)
        if not valid:
            return Dropped(
                parent=prompt_id, reason="invalid", detail="no episode has finite log-probabilities"
            )
        rollouts = tuple(self._rollout(o) for o in valid)
        scores = tuple(o.score for o in valid if o.score is not None)
        played = RolloutGroup(prompt=valid[0].prompt, rollouts=rollouts, chat_digest=self._chat.digest)
        return ScoredGroup(
            parents=(prompt_id,), group=played, scores=scores, reward_version=self._reward_version
        )

    def _rollout(self, one: _Open) -> Rollout:
        talk = one.talk or Conversation(self._chat.prompt(one.prompt))
        text = said(self.tokenizer, talk.token_ids[talk.num_opening :])
        temperature = self._config.sampling.temperature
        return talk.rollout(text=text, finish=one.finish, temperature=temperature, seed=one.seed)

    def close(self) -> None:
        """Give up what is under way and close the engine."""
        for one in list(self._open.values()):
            self._calls.forget(one.key)
            self._engine.cancel(one.key)
        self._engine.close()
        self._stack.close()


def _closed(episode: Episode) -> _Heard:
    episode.close()
    return _Heard()
