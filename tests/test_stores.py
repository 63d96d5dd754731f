"""Data behind clients of stores: S3, Google's and the hub, from servers here; and what can't be reached."""

from __future__ import annotations

import http.server
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arriero.components.datasets import open_blocks, read_rows
from arriero.components.prompts import PromptSource
from arriero.engine.errors import UserError
from arriero.launchers.cli import main
from arriero.schemas.messages import Prompt
from tests.drive import Alone, outputs
from tests.inline_runs import tiny_model

BUCKET = "arriero-test"


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A file system on a bucket of a server that speaks S3."""
    moto, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as env:
        # What the client reads in any other run, too: the address and the keys.
        env.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            env.setenv(name, "test")
        env.setenv("AWS_DEFAULT_REGION", "us-east-1")
        files: Any = s3fs.S3FileSystem(skip_instance_cache=True)
        files.mkdir(BUCKET)
        yield files
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture(scope="module")
def gcs() -> Iterator[Any]:
    """A file system on a bucket of a server that speaks Google's protocol."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as env:
        env.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        # Read at its import; it would ask for the kind of a bucket by gRPC.
        env.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        emulator, gcsfs = pytest.importorskip("gcp_storage_emulator.server"), pytest.importorskip("gcsfs")
        server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
        server.start()
        files: Any = gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True)
        yield files
        gcsfs.GCSFileSystem.clear_instance_cache()
    server.stop()


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as a reader of one file of the data set some/sums asks for."""

    content = b"".join(json.dumps({"prompt": f"p{k}"}).encode() + b"\n" for k in range(5))

    def do_GET(self) -> None:
        where = self.path.partition("?")[0]
        if where == "/api/datasets/some/sums":
            self._json({"id": "some/sums", "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        elif where.startswith("/api/datasets/some/sums/tree/main"):
            entry = {"type": "file", "path": "train.jsonl", "size": len(self.content), "oid": "1" * 40}
            self._json([entry])
        elif where == "/datasets/some/sums/resolve/main/train.jsonl":
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = self.content[int(first) : int(last) + 1]
            self._send(206, part, **{"Content-Range": f"bytes {first}-{last}/{len(self.content)}"})
        else:
            self._send(404, b"")

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_prompts_come_from_the_hub_whole_in_blocks_and_by_a_pattern(tmp_path: Path) -> None:
    """In a process of its own: the client reads the hub's address when it is imported."""
    ask = """
import sys
from arriero.components.datasets import open_blocks, read_rows
for path in sys.argv[1:]:
    print(len(read_rows(path)), sum(open_blocks(path, in_memory=False).sizes))
"""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}
        env |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        paths = ["hf://datasets/some/sums/train.jsonl", "hf://datasets/some/sums/*.jsonl"]
        told = subprocess.run(
            [sys.executable, "-c", ask, *paths],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        server.shutdown()
    assert told.stdout.split() == ["5"] * 4, told.stderr


async def drawn(source: PromptSource) -> list[Prompt]:
    return [p for p in await outputs(source.run()) if isinstance(p, Prompt)]


def lines(first: int, count: int) -> bytes:
    return b"".join(json.dumps({"prompt": f"p{k}"}).encode() + b"\n" for k in range(first, first + count))


async def test_prompts_come_from_googles_store_whole_in_blocks_and_by_a_pattern(gcs: Any) -> None:
    gcs.pipe_file(f"{BUCKET}/a.jsonl", lines(0, 3))
    gcs.pipe_file(f"{BUCKET}/b.jsonl", lines(3, 2))
    path = f"gs://{BUCKET}/a.jsonl"
    assert sorted(p.text for p in await drawn(PromptSource(path=path, epochs=1))) == ["p0", "p1", "p2"]
    assert len(await drawn(PromptSource(path=path, epochs=1, stream=1))) == 3
    both = PromptSource(path=f"gs://{BUCKET}/*.jsonl", epochs=1, shuffle=False)
    assert [(p.row, p.text) for p in await drawn(both)] == [(k, f"p{k}") for k in range(5)]


async def test_prompts_come_from_s3_whole_in_blocks_and_by_a_pattern(s3: Any) -> None:
    s3.pipe(f"{BUCKET}/a.jsonl", lines(0, 3))
    s3.pipe(f"{BUCKET}/b.jsonl", lines(3, 2))
    path = f"s3://{BUCKET}/a.jsonl"
    assert sorted(p.text for p in await drawn(PromptSource(path=path, epochs=1))) == ["p0", "p1", "p2"]
    assert len(await drawn(PromptSource(path=path, epochs=1, stream=1))) == 3
    both = PromptSource(path=f"s3://{BUCKET}/*.jsonl", epochs=1, shuffle=False)
    assert [(p.row, p.text) for p in await drawn(both)] == [(k, f"p{k}") for k in range(5)]


def test_row_groups_of_parquet_are_read_one_by_one_from_s3(s3: Any, tmp_path: Path) -> None:
    pa, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"p{k}"} for k in range(10)]
    library.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet", row_group_size=4)
    s3.put(str(tmp_path / "d.parquet"), f"{BUCKET}/tables/d.parquet")
    blocks = open_blocks(f"s3://{BUCKET}/tables/d.parquet", in_memory=False)
    assert list(blocks.sizes) == [4, 4, 2]
    assert [r.values for r in blocks.read(1)] == rows[4:8]


def test_what_is_not_in_s3_is_named_in_one_line(s3: Any) -> None:
    with pytest.raises(UserError) as error:
        read_rows(f"s3://{BUCKET}/absent.jsonl")
    told = str(error.value)
    assert told.startswith(f"s3://{BUCKET}/absent.jsonl: can't be read: ")
    assert "\n" not in told


@pytest.mark.parametrize("url", ["s3://b/d.jsonl", "gs://b/d.jsonl", "hf://datasets/a/b/d.parquet"])
def test_a_check_touches_no_store(url: str) -> None:
    assert list(PromptSource(path=url).problems(Alone())) == []


def test_a_preset_is_accepted_by_check_and_refused_in_one_line_where_the_hub_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At an address where nobody listens."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("ARRIERO_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    words = ["--model", tiny_model(tmp_path / "m"), "--data", "gsm8k", "--reward", "gsm8k"]
    words += ["--sampling.max-new-tokens", "4", "--groups-per-step", "2", "--samples", "2", "--slots", "4"]
    assert main(["check", "grpo", *words]) == 0
    assert "hf://datasets/openai/gsm8k" in capsys.readouterr().out
    assert main(["run", "grpo", *words, "--inline", "--quiet", "--run-dir", str(tmp_path / "run")]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(told) == 1
    assert "hf://datasets/openai/gsm8k" in told[0]
    assert "can't be read: " in told[0]
