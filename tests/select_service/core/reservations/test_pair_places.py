"""Which two make a pair: where blocks may move, and what a request wishes."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.errors import NoTransfer, NoWorkerForRole
from select_service.types import PinnedWorker
from tests.select_service.core.reservations.apart import PROMPT, apart, paired
from tests.select_service.core.whole_fleet import Fleet

# -- where blocks may move -------------------------------------------------------------------------


def zone(name: str, enforcement: str | None = "required", **more: Any) -> dict[str, Any]:
    return {
        "topology_domains": {"zone": name},
        "kv_transfer_domain": "zone",
        "kv_transfer_enforcement": enforcement,
        **more,
    }


def test_a_required_transfer_domain_is_shared_by_both_legs() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", **zone("a"))
    fleet.worker(2, role="decode", topology_domains={"zone": "b"})
    with pytest.raises(NoTransfer):
        fleet.pair("p", *PROMPT)
    fleet.worker(3, role="decode", topology_domains={"zone": "a"})
    fleet.book("load", 3, *range(50, 80))
    assert paired(fleet.pair("p", *PROMPT)).decode.worker_id == 3
    fleet.worker(4, role="decode")  # nobody knows where it is
    assert paired(fleet.pair("q", *PROMPT)).decode.worker_id == 3


def test_where_blocks_cannot_move_one_worker_does_all() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill", **zone("a"))
    fleet.worker(2, role="decode", **zone("b"))
    fleet.worker(3)
    answer = paired(fleet.pair("p", *PROMPT))
    assert (answer.mode, answer.reason) == ("aggregated", "no_kv_transfer")


# -- wishes ----------------------------------------------------------------------------------------


def test_a_pinned_rank_is_one_leg_and_leaves_the_other_free() -> None:
    fleet = apart()
    fleet.worker(3, role="prefill")
    fleet.book("load", 3, *range(20, 60))
    answer = paired(fleet.pair("p", *PROMPT, pinned_worker=PinnedWorker(3, 0)))
    assert answer.prefill is not None
    assert (answer.prefill.worker_id, answer.decode.worker_id) == (3, 2)


def test_only_allowed_workers_make_a_pair() -> None:
    fleet = apart()
    fleet.worker(3, role="prefill")
    answer = paired(fleet.pair("p", *PROMPT, allowed_worker_ids=[2, 3]))
    assert answer.prefill is not None
    assert answer.prefill.worker_id == 3
    with pytest.raises(NoWorkerForRole, match="no eligible prefill"):
        fleet.pair("q", *PROMPT, allowed_worker_ids=[2])
