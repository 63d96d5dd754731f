"""Runs to look at, and the page about them: its server on a real port, a real browser in front of it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass

from arriero.components.advantage import GroupAdvantage
from arriero.components.rewards import ExactMatch
from arriero.engine.graph import Graph
from arriero.engine.stream import Stream
from arriero.launchers.launch import inline
from arriero.launchers.options import LaunchOptions
from arriero.launchers.rundir import RunDir, create
from arriero.launchers.ui.answers import Answers
from arriero.launchers.ui.server import server
from arriero.schemas.graph import GraphSpec
from arriero.schemas.manifest import Hardware, PipelineSource, RunManifest
from arriero.schemas.messages import Prompt, RolloutGroup, Weights
from arriero.schemas.run import RunOptions
from tests.toys import ToyTrainer, rollout

if TYPE_CHECKING:
    from playwright.sync_api import ConsoleMessage, Dialog, Page

HOSTILE = (
    '</pre></title></svg><script>window.hacked=1</script><img src=x onerror="window.hacked=2">'
    '" onmouseover="window.hacked=3" \'><svg/onload=window.hacked=4>{{7*7}}\u202e'
)
TOKEN = "secret"
GROUPS, SIZE = 4, 3


@dataclass(frozen=True, kw_only=True)
class Asker:
    """Prompts for an answer of 4, with what isn't to be believed behind it."""

    behind: str = ""

    async def run(self) -> AsyncIterator[Prompt]:
        for k in range(1000):
            yield Prompt(id=f"e0-r{k}", text=f"2 + 2, for the {k}th time{self.behind}", answer="4", row=k)


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Three answers to each prompt; of prompt k, k % 3 + 1 are right."""

    behind: str = ""

    async def run(self, prompts: Stream[Prompt], weights: Stream[Weights]) -> AsyncIterator[RolloutGroup]:
        newest = await weights.next()
        async for prompt in prompts:
            while newest is not None and newest.version < prompt.min_version:
                newest = await weights.next()
            newest = weights.poll() or newest
            assert newest is not None
            made = [rollout(newest.version, tokens=(7, 8 + prompt.row, 9 + k, 2)) for k in range(SIZE)]
            texts = ["4" if k <= prompt.row % 3 else f"5{self.behind}" for k in range(SIZE)]
            rollouts = tuple(r.model_copy(update={"text": t}) for r, t in zip(made, texts, strict=True))
            yield RolloutGroup(prompt=prompt, rollouts=rollouts)


def asked_graph(*, steps: int, behind: str = "", seconds: NonNegativeFloat = 0.0) -> GraphSpec:
    g = Graph("asked")
    weights = g.loop(Weights, staleness=1)
    rollouts = g.add(Answerer(behind=behind), name="answerer")(
        g.add(Asker(behind=behind), name="asker")(), weights
    )
    scored = g.add(ExactMatch(), name="reward")(rollouts)
    batches = g.add(GroupAdvantage(groups=GROUPS), name="advantage")(scored)
    weights.close(g.add(ToyTrainer(steps=steps, seconds=seconds), name="trainer")(batches))
    return g.check()


def begun(path: Path, spec: GraphSpec, *, seed: int = 0) -> tuple[RunDir, RunOptions]:
    """The directory of a run that is about to start."""
    run = create(path)
    options = RunOptions(run_id=path.name, seed=seed, wait_bound_s=60, record=True, heartbeat_s=0.2)
    manifest = RunManifest(
        run_id=path.name, pipeline=PipelineSource(function="tests:asked", file=__file__, sha256="0" * 64),
        graph_digest=spec.digest, config={"optimizer": {"lr": 0.1 * (seed + 1)}}, sources={}, seed=seed,
        python="3", platform="linux", hardware=Hardware(cpus=1, memory_mb=1), host="here", pid=os.getpid(),
        started=datetime(2026, 1, 1, tzinfo=UTC), argv=("arriero", "run", "asked"),
    )  # fmt: skip
    run.begin(spec, options, manifest)
    return run, options


def asked_run(path: Path, *, steps: int = 4, behind: str = "", seconds: float = 0.0, seed: int = 0) -> RunDir:
    """A run, to its end, in this process."""
    spec = asked_graph(steps=steps, behind=behind, seconds=seconds)
    run, options = begun(path, spec, seed=seed)
    assert inline(spec, options, run, LaunchOptions(quiet=True)) == 0
    return run


@contextmanager
def serving(run: RunDir) -> Generator[str]:
    """The address of the page about a run, with its secret."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        served = server(Answers(run), TOKEN)
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until = time.monotonic() + 30
        while not served.started:
            assert thread.is_alive(), "the server has ended"
            assert time.monotonic() < until, "the server didn't start within 30 s"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/{TOKEN}/"
        finally:
            served.should_exit = True
            thread.join(10)
            assert not thread.is_alive()


class Window:
    """A page in a browser, and everything that it complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", self._interrupted)
        page.on("request", lambda request: self.asked.append(request.url))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _interrupted(self, dialog: Dialog) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()


@contextmanager
def opened() -> Generator[Window]:
    """A window of the Chromium that this machine has; skips the test where it has none."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    if (path := next((p for n in names if (p := shutil.which(n))), None)) is None:
        pytest.skip("no chromium on PATH (on Debian: apt-get install chromium)")
    # As root it has no sandbox; it is to look for nothing on the network.
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=quiet)
        try:
            page = browser.new_page()
            page.set_default_timeout(20_000)
            yield Window(page)
        finally:
            browser.close()


if __name__ == "__main__":
    asked_run(Path(sys.argv[1]), steps=int(sys.argv[2]), seconds=float(sys.argv[3]))
