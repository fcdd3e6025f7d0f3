"""The client's own wheel works with httpx and msgspec alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from select_service.client import Client
from tests.e2e.test_client import spec, url
from tests.live.server import Server
from tests.wait import PATIENCE_S

ROOT = Path(__file__).parents[2]
_USE = """
import asyncio, importlib.util, sys
from select_service.client import AsyncClient, Client, MissingPackage, Options

for name in ("numpy", "zmq", "starlette", "uvicorn", "yaml", "prometheus_client", "xxhash"):
    assert importlib.util.find_spec(name) is None, name

with Client(sys.argv[1]) as client:
    with client.reserve(token_ids=list(range(64))) as r:
        r.prefill_complete(cached_tokens=0)
        r.output_tokens(16)
    client.flush()
    print(r.endpoint)

async def main():
    options = Options(hash_locally=True, block_size=16)
    async with AsyncClient(sys.argv[1], options=options) as client:
        try:
            await client.reserve(token_ids=[1])
        except MissingPackage as error:
            print(error)

asyncio.run(main())
from select_service.cli import main as command
print(command(["workers", "--url", sys.argv[1]]))
"""


@pytest.mark.heavy
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_httpx_and_msgspec_are_enough(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["make", "client", f"VENV={sys.prefix}", f"CLIENT={wheels}"]
    subprocess.run(build, cwd=ROOT, check=True)
    environment = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")]
    subprocess.run(environment, check=True)
    python = str(tmp_path / "venv/bin/python")
    (wheel,) = wheels.glob("select_service_client-*.whl")
    subprocess.run([*pip, "--python", python, "install", str(wheel)], check=True)
    with Server(tmp_path / "log") as server:
        with Client(url(server)) as client:
            client.upsert_worker(spec(1))
        done = subprocess.run(
            [python, "-W", "error", "-c", _USE, url(server)],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[:2] == [
        "ray://w1",
        "hashing in the client needs xxhash: pip install 'xxhash>=3.4.1'",
    ]
    assert (said[2].split()[:2], "ray://w1" in said[3], said[-1]) == (
        ["WORKER", "MODEL"],
        True,
        "0",
    )
