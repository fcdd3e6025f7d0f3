"""State directories that earlier commits have written, byte by byte as they left them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.select_service.edge.state.lives import life, post

WRITTEN = Path(__file__).parents[3] / "golden" / "state"


class Said(msgspec.Struct):
    """What a commit had said over HTTP before it was stopped."""

    repeats: list[tuple[str, dict[str, Any], dict[str, Any]]]  # route, body, its answer
    loads: list[dict[str, Any]]
    workers: list[dict[str, Any]]


@pytest.mark.parametrize("commit", sorted(path.name for path in WRITTEN.iterdir()))
async def test_what_an_earlier_commit_has_written_comes_back(tmp_path: Path, commit: str) -> None:
    """All of it, and whoever repeats a booking gets the first answer.

    That fails when a request has a new member that is written where it was not said: such a member
    must be UNSET unless somebody says it, see `fingerprint_of`.
    """
    said = msgspec.json.decode((WRITTEN / commit / "said.json").read_bytes(), type=Said)
    shutil.copy(WRITTEN / commit / "state.db", tmp_path)
    async with life(tmp_path, admission_control="token-capacity") as (client, service):
        state = (await client.get("/ready")).json()["state"]
        assert (state["damage"], any(state["dropped"].values())) == ([], False)
        assert (await client.get("/loads")).json() == said.loads
        assert (await client.get("/workers")).json() == said.workers
        for route, body, answer in said.repeats:
            again = await post(client, route, body)
            assert (again.status_code in {200, 201}, again.json()) == (True, answer), route
        assert (await client.get("/loads")).json() == said.loads, "nothing was booked twice"
        assert (await client.delete("/reservations/gone")).status_code == 200
        assert (await client.delete("/leases/lease")).status_code == 200
        assert (await client.get("/admission")).json()["policy"] == "token-bucket"
        assert service.core.admission_controller.thresholds.entry("default", None) is not None
