"""Kubernetes: not yet."""

from __future__ import annotations

from arriero.engine.errors import UserError


def create_scheduler(session_name: str) -> object:
    raise UserError(f"{session_name}: --on kubernetes doesn't work yet; use slurm")
