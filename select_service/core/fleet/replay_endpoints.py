"""Where the replay of each data-parallel rank is asked for.

An engine binds one publisher and one replay socket for each rank, at its configured port + the
rank (vLLM and SGLang alike). A record names the replay endpoint of each rank, or a single one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core.endpoint import at_rank, tcp_address

if TYPE_CHECKING:
    from collections.abc import Mapping


def replay_endpoints(
    events: Mapping[int, str], single: str | None, by_rank: Mapping[int, str]
) -> dict[int, str]:
    """Return dp_rank → replay endpoint, for the ranks that have one.

    A rank's own entry counts before the single endpoint. Of several ranks, the single endpoint is
    the one that the engine was configured with, and rank r is asked at its port + r, if the event
    endpoints show that the engine counts its ports by rank: all are TCP, and port - rank is the
    same for all. Where each rank publishes on a host of its own, and the single endpoint is on that
    of the first, each rank is asked on its own host. Otherwise (one publisher for all ranks, ipc,
    ports in no order) every rank is asked at the single endpoint as it is; so is the only rank of a
    worker, whatever its number.

    Args:
        events: dp_rank → KV-event endpoint.
        single: the record's `replay_endpoint`.
        by_rank: the record's `replay_endpoints`; entries of ranks without events are left out.
    """
    found = {} if single is None else _derived(events, single)
    found.update((rank, at) for rank, at in by_rank.items() if rank in events)
    return found


def _derived(events: Mapping[int, str], single: str) -> dict[int, str]:
    base = tcp_address(single)
    addresses = {rank: tcp_address(at) for rank, at in events.items()}
    known = {rank: at for rank, at in addresses.items() if at is not None}
    if base is None or len(events) == 1 or len(known) < len(events):
        return dict.fromkeys(events, single)
    counts_by_rank = len({port - rank for rank, (_, port) in known.items()}) == 1
    ports_are_equal = len({port for _, port in known.values()}) == 1
    if not (counts_by_rank or ports_are_equal):
        return dict.fromkeys(events, single)
    host, port = base
    follows_hosts = known[min(known)][0] == host
    return {
        rank: at_rank(
            f"tcp://{there if follows_hosts else host}:{port}", rank if counts_by_rank else 0
        )
        for rank, (there, _) in known.items()
    }
