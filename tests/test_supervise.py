"""What the launching process notices of a run that it watches."""

from arriero.engine.memory import MemoryBroker
from arriero.launchers.hub import declare
from arriero.launchers.supervise import Supervisor
from arriero.schemas.run import RunOptions
from tests.runtime_runs import graph


async def test_a_watch_that_fails_by_itself_fails_the_run() -> None:
    spec, options, broker = graph(), RunOptions(run_id="watched"), MemoryBroker()
    await declare(broker, spec, options)
    supervisor = Supervisor(spec, options, ())

    def show() -> None:
        raise BrokenPipeError("nobody reads the display")

    supervisor.watch_run(broker, show)
    failure = await supervisor.failure()
    assert "BrokenPipeError: nobody reads the display" in failure.message
    await supervisor.close()
    await broker.close()
