"""The page and what it asks for, below an address that holds a secret.

| path            | gives                                                                     |
|-----------------|---------------------------------------------------------------------------|
| /               | the page; static/...: its script and style                                 |
| events          | the run now, and again whenever it has changed (server-sent events)        |
| api/...         | JSON: run, measures, rollouts, rollout, lineage, runs, compare             |
| pictures/...    | SVG: graph, curve, distribution, timeline, compare                         |

What a model has written leaves here as JSON or as escaped text, and the page may only put it into text:
the policy forbids every script, style and address but its own, and any HTML made of a string.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from arriero.engine.errors import UserError, one_line
from arriero.launchers.report_rollouts import STYLE
from arriero.launchers.ui.answers import Answers

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LEAVE_S = 5  # for answers under way
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
_log = logging.getLogger(__name__)


def server(answers: Answers, token: str) -> uvicorn.Server:
    """Serves the page; every address of it begins with /`token`/."""
    config = uvicorn.Config(
        _app(answers, token), log_level="error", access_log=False, ws="none",
        timeout_graceful_shutdown=_LEAVE_S,
    )  # fmt: skip
    made = uvicorn.Server(config)
    answers.watch.leaving = lambda: made.should_exit
    return made


def _app(answers: Answers, token: str) -> Starlette:

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        watching = asyncio.create_task(answers.watch.watch())
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching

    async def events(_: Request) -> StreamingResponse:
        return StreamingResponse(answers.watch.events(), media_type="text/event-stream")

    def page(_: Request) -> Response:
        return Response((STATIC / "page.html").read_text(encoding="utf-8"), media_type="text/html")

    def tokens(_: Request) -> Response:
        return Response(STYLE, media_type="text/css")

    routes = [
        Route("/", page),
        Route("/tokens.css", tokens),
        Route("/events", events),
        *(Route(f"/api/{name}", _json(give)) for name, give in answers.data.items()),
        *(Route(f"/pictures/{name}", _picture(draw)) for name, draw in answers.pictures.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=[Mount("/{token}", routes=routes)],
        middleware=[
            # An address of another site that leads here (DNS rebinding) has another name.
            Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1"]),
            Middleware(_Guarded, token=token),
        ],
        lifespan=lifespan,
    )


class _Guarded:
    """Nothing without the token; the headers on everything."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                ours = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *ours]
            await send(message)

        given = scope["path"].removeprefix("/").partition("/")[0].encode()
        known = secrets.compare_digest(given, self._token)
        answer: ASGIApp = self._app if known else Response("the address has no valid token", status_code=403)
        await answer(scope, receive, with_headers)


Give = Callable[[dict[str, str]], Any]


def _json(give: Give) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        try:
            found = give(dict(request.query_params))
        except Exception as error:  # noqa: BLE001  # whatever a damaged file raises; the page stays
            return _refused(error)
        return Response(_ANY.dump_json(found), media_type="application/json")

    return answer


def _picture(draw: Callable[[dict[str, str]], str]) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        try:
            drawn = draw(dict(request.query_params))
        except Exception as error:  # noqa: BLE001  # whatever a damaged file raises; the page stays
            return _refused(error)
        if not drawn:
            return Response(status_code=204)
        namespace = "" if "xmlns=" in drawn else ' xmlns="http://www.w3.org/2000/svg"'
        return Response(drawn.replace("<svg", f"<svg{namespace}", 1), media_type="image/svg+xml")

    return answer


def _refused(error: Exception) -> Response:
    """What the page shows in place of an answer: a mistake of its user, or files that can't be read."""
    if isinstance(error, UserError):
        return JSONResponse({"error": str(error)}, status_code=400)
    if isinstance(error, ValidationError):
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return JSONResponse({"error": told}, status_code=400)
    _log.warning("a question of the page has no answer", exc_info=error)
    told = f"this can't be read: {one_line(error)}; the files of the run are damaged, see arriero audit"
    return JSONResponse({"error": told}, status_code=500)
