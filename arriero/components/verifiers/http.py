"""POST of JSON over HTTP/1.1 on asyncio: cancelled at once, bounded in size, nothing to install.

No proxies and no redirects: an endpoint that scores is one's own.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from pydantic import JsonValue

MOST_BYTES = 16 << 20


class HttpError(Exception):
    """No useful answer. `status` is 0 without one; `retry_after_s` is what the server asked for."""

    def __init__(self, why: str, *, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.retry_after_s = status, retry_after_s

    @property
    def passing(self) -> bool:
        """Whether another try may succeed."""
        return self.status in (0, 408, 409, 425, 429) or self.status >= 500


async def post(url: str, body: JsonValue, headers: Mapping[str, str]) -> JsonValue:
    """The answer's JSON. Raises HttpError."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise HttpError(f"{url!r} is no http or https address", status=400)
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname, parts.port or (443 if secure else 80), limit=MOST_BYTES,
            ssl=ssl.create_default_context() if secure else None,
        )  # fmt: skip
    except OSError as error:
        raise HttpError(f"{parts.netloc}: {error}") from error
    try:
        data = json.dumps(body).encode()
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = {
            "Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json",
            "Accept": "application/json", "Content-Length": str(len(data)), "Connection": "close", **headers,
        }  # fmt: skip
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + data)
        await writer.drain()
        return await _answer(reader, parts.netloc)
    except (
        OSError,
        asyncio.IncompleteReadError,
        asyncio.LimitOverrunError,
        ValueError,
        RecursionError,
    ) as error:
        raise HttpError(f"{parts.netloc}: {type(error).__name__}: {error}") from error
    finally:
        writer.transport.abort()


async def _answer(reader: asyncio.StreamReader, where: str) -> JsonValue:
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    body = await _body(reader, headers)
    status = int(status_line.split(" ", 2)[1])
    if status != 200:
        after = headers.get("retry-after", "")
        text = " ".join(body[:300].decode(errors="replace").split())
        wait_s = float(after) if after.replace(".", "", 1).isdigit() else 0.0
        raise HttpError(f"{where}: {status} {text}", status=status, retry_after_s=wait_s)
    found: JsonValue = json.loads(body)
    return found


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        parts = list[bytes]()
        while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            if size + sum(map(len, parts)) > MOST_BYTES:
                raise ValueError(f"an answer of over {MOST_BYTES} bytes")
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        return b"".join(parts)
    size = int(headers.get("content-length", -1))
    if size > MOST_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    if size >= 0:
        return await reader.readexactly(size)
    found = bytearray()  # up to where the server closes the connection
    while data := await reader.read(1 << 16):
        found += data
        if len(found) > MOST_BYTES:
            raise ValueError(f"an answer of over {MOST_BYTES} bytes")
    return bytes(found)
