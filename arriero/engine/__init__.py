"""Graph building and checks, edges, the runtime of a role, ledger, weight plane, lineage and planner."""
