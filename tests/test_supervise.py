"""What the launching process notices of a run that it watches."""

from arriero.engine.memory import MemoryBroker
from arriero.launchers.hub import declare
from arriero.launchers.supervise import Supervisor
from arriero.launchers.vitals import Pulse, Vitals, wait_graph
from arriero.schemas.run import RoleStatus, RunOptions
from tests.runtime_runs import graph


def test_the_wait_graph_names_a_replica_that_blocks_its_event_loop() -> None:
    spec = graph()
    vitals = Vitals(())
    for role, lag_s in (("generator", 42.0), ("reward", 0.2)):
        status = RoleStatus(role=role, replica=0, pid=1, host="here", lag_s=lag_s, nodes=())
        vitals.pulses[f"{role}-0-0"] = Pulse(status=status, age_s=0.1)
    said = [line for line in wait_graph(spec, vitals).splitlines() if "event loop" in line]
    assert said == ["  generator-0-0  hasn't let its event loop run for 42.0 s"]


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
