"""What the service says of its index, and of a prompt that it foretold wrongly.

Asked at once and a little later: what is only late comes, and what is lost does not.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, Final

import httpx

from tests.engines.event_log import EventLog, Rank
from tests.engines.exchange import Exchange

LATER_S: Final = (0.0, 0.1, 0.4, 1.5)
SERIES: Final = ("select_service_kv_", "select_service_index_orphan_blocks")


async def applied_batches(http: httpx.AsyncClient, service: str) -> dict[Rank, int]:
    """The number of the last batch that the service has applied, of each rank that has one."""
    rows: Any = (await http.get(f"{service}/trust")).json()["ranks"]
    last = {_rank_of(row): row["index"]["last_batch"] for row in rows}
    return {rank: batch for rank, batch in last.items() if batch is not None}


async def evidence(
    http: httpx.AsyncClient, service: str, scope: str, exchange: Exchange, log: EventLog
) -> list[str]:
    """Lines for a failure's message; times are seconds since the selection."""
    rank = exchange.worker_id, exchange.rank
    body = {"token_ids": exchange.prompt, "model_name": scope, **exchange.flavor.fields}
    lines = []
    for pause_s in LATER_S:
        await asyncio.sleep(pause_s)
        scores: Any = (await http.post(f"{service}/overlap_scores", json=body)).json()
        trust: Any = (await http.get(f"{service}/trust")).json()
        (blocks,) = (one["device_blocks"] for one in scores["workers"] if _rank_of(one) == rank)
        (index,) = (one["index"] for one in trust["ranks"] if _rank_of(one) == rank)
        at = round(monotonic() - exchange.begun, 2)
        lines.append(f"at {at}: {blocks} blocks; batch {log.last[rank]} was received, {index}")
    metrics = (await http.get(f"{service}/metrics")).text
    said = (line for line in metrics.splitlines() if line.startswith(SERIES))
    return [*lines, *(line for line in said if float(line.rpartition(" ")[2]))]


def _rank_of(row: dict[str, Any]) -> Rank:
    return row["worker_id"], row["dp_rank"]
