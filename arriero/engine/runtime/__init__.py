"""The runtime of a role: it runs nodes, answers leases, and writes what became of every record."""

from arriero.engine.runtime.context import Context, current
from arriero.engine.runtime.ledger import Ledger, LedgerError
from arriero.engine.runtime.role import run_role
from arriero.engine.runtime.waits import WaitTimeout

__all__ = ["Context", "Ledger", "LedgerError", "WaitTimeout", "current", "run_role"]
