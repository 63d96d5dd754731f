"""What an API server of Kubernetes answers when it refuses, for people."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from arriero.engine.errors import UserError

_REMEDIES = {
    401: "log in again: `kubectl auth whoami` says who you are",
    403: "ask for the right to it; `kubectl auth can-i --list` shows which you have",
    404: "is Volcano installed, and does the namespace exist? `kubectl api-resources | grep volcano`",
    409: "submit again",
    422: "correct the profile; `arriero check --on kubernetes` shows the manifest",
}


@contextmanager
def told() -> Generator[None]:
    """What the API server answers, in one line, with the remedy."""
    try:
        yield
    except ApiException as error:
        remedy = _REMEDIES.get(http_code(error), "")
        raise UserError(
            f"the API server says: {_message(error)}" + (f"; {remedy}" if remedy else "")
        ) from error
    except HTTPError as error:
        raise UserError(
            f"the API server can't be reached ({error}); `kubectl config current-context` says which it is"
        ) from error


def http_code(error: Any) -> int:
    return int(error.status or 0)


def _message(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
