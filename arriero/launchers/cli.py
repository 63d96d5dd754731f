"""The `arriero` command. A user's mistake is one line on stderr per problem and exit code 2.

Imports stand inside the commands: the command line must answer at once, and checking a graph needs no torch.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from arriero import __version__
from arriero.engine.errors import UserError

if TYPE_CHECKING:
    from arriero.launchers.catalog import Pipeline
    from arriero.launchers.options import Assignment
    from arriero.launchers.preparing import Ready
    from arriero.launchers.rundir import RunDir
    from arriero.schemas.graph import GraphSpec

USAGE = """\
usage: arriero COMMAND ...

  run PIPELINE [--key value ...] [--config FILE.toml]    train; `run PIPELINE --help` lists every key
  run --from RUN@STEP [--key value ...]                  another run from the weights of one, with its options
  run --resume RUN [--key value ...]                     go on with a run that was stopped, failed or finished
  eval MODEL|RUN [--data D] [--reward R] [--json]        pass@k of a model, or of the model that a run left
  check PIPELINE [the same] [--picture FILE] [--json]    check and show the graph; starts nothing
  check PIPELINE [the same] --laws                       try its losses against the laws every loss must obey
  plan PIPELINE --model M --gpus N [--hardware NAME]     how to split a cluster for it
  plan --from RUN                                        what to change about a run
  run|check PIPELINE [the same] --on slurm|kubernetes    on a cluster, with a profile of arriero.toml
  status|logs|cancel RUN                                 a run anywhere: its state, what it prints; stop it
  scale RUN generator=6 [reward=3]                       replicas join or leave, while the run goes on
  runs [DIR|RUN RUN] [--where key=value]                 list runs; what differs between two
  lineage RUN --step N|--rollout ID|--prompt ID|...      what trained these weights; what became of a prompt
  top RUN|--credentials FILE [--once]                    a run as it goes on: edges, roles, waits, curves
  ui RUN [--port N]                                      a page about a run, live, on this machine
  report|trace RUN [--out FILE]                          a run as one HTML page; as a trace for Perfetto
  doctor [RUN]                                           why a run doesn't get on; what isn't installed here
  audit RUN [--head HASH] [--json]                       check a run from its record alone
  replay RUN --step K [--until-divergence]               take a recorded step again, and compare
  fork RUN --step K --change loss.rho=4                  the same under another trainer
  export RUN --to FORMAT [--out PATH]                    for OpenLineage, PROV, MLflow, W&B, ..., or as a page
  new NAME [--dir FOLDER]                                an algorithm of your own: one file, and its test
  list                                                   the pipelines that come with arriero
  demo                                                   train a small model on this machine
  --version, --help

PIPELINE is a name from `list`, a module (package.my_algo) or a file (path/to/my_algo.py)."""

# Commands about runs that there are: each takes its words and what shows text.
_ABOUT_RUNS = {
    "runs": "runs:runs",
    "lineage": "lineage:lineage",
    "audit": "audit:audit",
    "export": "exports.command:export",
    "replay": "replaying:replay",
    "fork": "replaying:fork",
    "doctor": "doctor:doctor",
    "new": "new:new",
    "report": "report:report",
    "top": "top:top",
    "trace": "trace:trace",
    "ui": "ui.command:ui",
    "status": "job_commands:status",
    "logs": "job_commands:logs",
    "cancel": "job_commands:cancel",
    "scale": "scale:scale",
}
OK, BROKEN, MISTAKE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141


def main(argv: list[str] | None = None) -> int:
    """Run the command and give its exit code."""
    if argv is None:  # the command itself: SIGTERM ends it as Ctrl-C does, from the first moment on
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    args = list(sys.argv[1:] if argv is None else argv)
    # A reward or loss of the user's own stands in a file here; roles start with this directory on their path.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return _command(args)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"arriero: error: {line}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("arriero: interrupted", file=sys.stderr)
        return INTERRUPTED


def _command(args: list[str]) -> int:
    name, rest = (args[0], args[1:]) if args else ("--help", [])
    if name in {"--help", "-h", "help"}:
        return _printed(lambda: USAGE)
    if name in {"--version", "-V"}:
        return _printed(lambda: f"arriero {__version__}")
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "check": _check,
        "eval": _eval,
        "plan": _plan,
        **{name: partial(_about_runs, name) for name in _ABOUT_RUNS},
        "list": _list,
        "demo": _demo,
    }
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(commands)}"
        raise UserError(f"unknown command {name}; {hint}")
    return commands[name](rest)


def _printed(text: Callable[[], str]) -> int:
    """Print on stdout; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text(), flush=True)
    except BrokenPipeError:
        # Or the interpreter complains when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return OK


def _pipeline(command: str, args: list[str]) -> Pipeline:
    from arriero.launchers import catalog

    if not args or args[0].startswith("-"):
        raise UserError(f"{command} needs a pipeline first: arriero {command} PIPELINE --key value ...")
    return catalog.find(args[0])


def _prepare(pipeline: Pipeline, args: list[str], base: Sequence[Assignment] = ()) -> Ready:
    from arriero.launchers.preparing import prepare

    return prepare(pipeline, args, base)


def _wants_help(command: str, args: list[str]) -> str | None:
    """The help that was asked for, or None."""
    if not {"--help", "-h"} & {*args}:
        return None
    if args[0].startswith("-"):
        return USAGE
    from arriero.launchers.options import Arguments
    from arriero.launchers.show import help_text

    return help_text(command, _pipeline(command, args), Arguments)


def _check(args: list[str]) -> int:
    import io

    from arriero.launchers import show

    if text := _wants_help("check", args):
        return _printed(lambda: text)
    ready = _prepare(_pipeline("check", args), args[1:])
    if ready.options.picture:
        show.write_picture(ready.spec, ready.options.picture)
    if ready.options.laws:
        return _check_laws(ready.spec)
    if ready.options.json:
        return _printed(lambda: ready.spec.model_dump_json(indent=2))
    out = io.StringIO()
    hubs = ready.options.hub.replicas
    show.report(ready.pipeline, ready.config, ready.sources, ready.spec, hubs, out)
    if _on_cluster(ready):
        from arriero.launchers import job_commands

        job_commands.check(ready, out)
    return _printed(lambda: out.getvalue() if not ready.options.quiet else "")


def _on_cluster(ready: Ready) -> bool:
    return ready.options.on != "local" or bool(ready.options.profile)


def _check_laws(spec: GraphSpec) -> int:
    """Say of each loss of the graph which laws it breaks; 1 if it breaks any. Imports torch."""
    from arriero.components.laws import graph_violations
    from arriero.engine.graph import Graph

    found = graph_violations(Graph.from_spec(spec))
    lines = [
        f"{place}: {said}"
        for place, violations in found.items()
        for said in ([str(v) for v in violations] or ["holds to all laws"])
    ]
    code = _printed(lambda: "\n".join(lines or ["no component of the graph has a loss"]))
    return BROKEN if any(found.values()) else code


def _list(args: list[str]) -> int:
    from arriero.launchers import catalog

    if args and args[0] not in {"--help", "-h"}:
        raise UserError(f"list takes no arguments, got {' '.join(args)}")
    found = catalog.listed()
    width = max(map(len, found), default=0)
    return _printed(lambda: "\n".join(f"{name:{width}}  {doc}".rstrip() for name, doc in found.items()))


def _about_runs(name: str, args: list[str]) -> int:
    ask: Callable[[list[str], Callable[[str], int]], int]
    module, function = _ABOUT_RUNS[name].split(":")
    ask = getattr(import_module(f"arriero.launchers.{module}"), function)
    return ask(args, lambda text: _printed(lambda: text))


def _plan(args: list[str]) -> int:
    from arriero.launchers.plan import answer

    return _printed(lambda: answer(args))


def _demo(args: list[str]) -> int:
    from arriero.launchers.demo import demo

    return demo(args)


def _run(args: list[str]) -> int:
    if text := _wants_help("run", args):
        return _printed(lambda: text)
    from arriero.launchers import branching

    if any(word.partition("=")[0] == "--resume" for word in args):
        from arriero.launchers.again import words_of

        args = words_of(args)
    elif branching.branches(args):
        args = branching.words_of(args)
    ready = _prepare(_pipeline("run", args), args[1:])
    if ready.options.picture or ready.options.json or ready.options.laws:
        raise UserError("--picture, --json and --laws belong to arriero check")
    if ready.options.allow_change and ready.options.resume is None:
        raise UserError("--allow-change belongs to --resume RUN")
    if _on_cluster(ready):
        from arriero.launchers import job_commands

        return job_commands.run(ready, ["arriero", "run", *args])
    return _start(ready, ["arriero", "run", *args])[0]


def _eval(args: list[str]) -> int:
    from arriero.launchers import catalog, evaluate

    pipeline = catalog.find(catalog.EVALUATION)
    if text := _wants_help("eval", [catalog.EVALUATION, *args]):
        return _printed(lambda: text)
    if not args or args[0].startswith("-"):
        raise UserError(
            "eval needs a model or run directory first: arriero eval MODEL --data DATA --reward KIND"
        )
    model, version, base = evaluate.target_of(args[0])
    ready = _prepare(pipeline, args[1:], base)
    if ready.options.picture or ready.options.laws:
        raise UserError("--picture and --laws belong to arriero check")
    if _on_cluster(ready):
        raise UserError("eval runs on this machine; leave --on and --profile out")
    code, run = _start(ready, ["arriero", "eval", *args], result=False)
    if code:
        return code
    as_json = ready.options.json
    return _printed(lambda: evaluate.conclude(run, model=model, version=version, as_json=as_json))


def _start(ready: Ready, argv: list[str], *, result: bool = True) -> tuple[int, RunDir]:
    """Make the run directory and hand over to the launcher; the exit code, and the directory."""
    from arriero.launchers import again, launch, preparing
    from arriero.launchers.options import LaunchOptions

    given, path = ready.options, ready.pipeline.search_path
    if given.inline:
        launch.check_inline(ready.spec, hubs=given.hub.replicas)
    begin = preparing.begin if given.resume is None else again.begin_again
    begun = begin(ready, argv)
    if not given.quiet:
        print(f"arriero: run directory {begun.run.path}", file=sys.stderr)
    options = LaunchOptions(
        port=given.port,
        quiet=given.quiet or not result,
        result=result,
        python_path=(path,) if path else (),
    )
    start = launch.inline if given.inline else launch.launch
    return start(ready.spec, begun.options, begun.run, options), begun.run


if __name__ == "__main__":
    sys.exit(main())
