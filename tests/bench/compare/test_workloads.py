"""Every kind of workload, small, against the real service alone: it runs, checks and reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.compare.dumping import Dump
from bench.compare.ingest import Ingest
from bench.compare.inprocess import InProcess
from bench.compare.lifecycles import Lifecycle, PrefixSharing, Reordered
from bench.compare.memory import Memory
from bench.compare.paced import Mixed, PacedSelect
from bench.compare.run import measure
from bench.compare.served import Served
from bench.compare.servers import OURS, contenders
from bench.compare.starting import Start
from bench.compare.target import expect
from bench.compare.workloads import Overlap, Select
from bench.load.http import Answer, BadAnswer

if TYPE_CHECKING:
    from bench.compare.run import Workload

SMALL: list[Workload] = [
    Served(Select("W1 isl 512", isl=512, operations=40, ring=4)),
    Served(Select("W3 isl 512", isl=512, operations=40, ring=4, tokens=True)),
    Served(Overlap("W2 isl 512", isl=512, operations=40, families=4, ring=8)),
    Served(Lifecycle("W4 isl 512", operations=40, isl=512, standing=4, ring=4)),
    Served(
        Lifecycle(
            "W4 shared prefixes",
            operations=40,
            isl=512,
            standing=8,
            ring=4,
            content=PrefixSharing(families=4, indexed_blocks=8_320),
        )
    ),
    Served(
        Lifecycle(
            "W4 shared prefixes, http.client",
            operations=20,
            isl=512,
            standing=8,
            ring=4,
            content=PrefixSharing(families=4, indexed_blocks=8_320),
            plain_client=True,
        )
    ),
    Served(
        Lifecycle("W4 hashes that repeat", operations=40, standing=8, ring=4, content=Reordered())
    ),
    Served(PacedSelect("W1 paced", isl=512, seconds=0.1, ring=4)),
    Served(Mixed("W7", seconds=0.1, isl=512, sequences=16, blocks_rate=6400, ring=4)),
    Served(Ingest("W6", blocks=4096)),
    Served(Dump("W9", blocks=4096)),
    Memory("W8", pairs=8192, holders=2),
    Start("W10", starts=1),
    InProcess("W11", operations=40, isl=512, ring=4),
]


@pytest.mark.e2e
@pytest.mark.parametrize("workload", SMALL, ids=lambda one: one.name)
def test_a_workload_gives_a_reading_for_each_of_its_rows(workload: Workload) -> None:
    samples = measure(
        workload, contenders([OURS]), rounds=1, connections=4, progress=lambda _: None
    )
    assert [one.row for one in samples] == list(workload.rows)
    assert {(one.contender, one.round_number) for one in samples} == {(OURS, 1)}
    if not isinstance(workload, Memory):  # so small an index may fit into what is there already
        assert all(one.value > 0 for one in samples)


def answer(body: bytes, status: int = 200) -> Answer:
    return Answer(operation=0, step=0, status=status, body=body)


RIGHT = b'{"worker_id": 1, "effective_prefill_tokens": 512, "overlap": {}}'


def test_a_right_answer_passes() -> None:
    expect(answer(RIGHT), {1: 512, 2: 512})


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (answer(RIGHT), {2: 512}),
        (answer(RIGHT), {1: 496, 2: 512}),
        (answer(RIGHT, status=503), {1: 512}),
    ],
)
def test_a_quick_and_wrong_answer_does_not(given: Answer, left: dict[int, int]) -> None:
    with pytest.raises(BadAnswer):
        expect(given, left)


def test_prompts_that_share_have_the_first_blocks_of_a_family() -> None:
    shared = PrefixSharing(families=4)
    standing, asked = shared.prompts(512, 8, "standing"), shared.prompts(512, 8, "")
    for one, other in zip(standing, asked, strict=True):  # of the same family
        common = [a == b for a, b in zip(one.sequence_hashes, other.sequence_hashes, strict=True)]
        assert 19 <= common.index(False) < 32
        assert not any(common[common.index(False) :])
    for left in shared.left(512, 8, "", range(1, 17)):
        assert len(left) == 16
        assert set(left.values()) <= {512 - 8 * 16, *(512 - 16 * one for one in range(19, 31))}


def test_hashes_that_repeat_come_at_many_positions() -> None:
    positions: dict[int, set[int]] = {}
    for prompt in Reordered().prompts(2048, 64, ""):
        assert len(prompt.sequence_hashes) == 128
        for at, value in enumerate(prompt.sequence_hashes):
            positions.setdefault(value, set()).add(at)
    assert len(positions) == 64 * 8
    assert min(map(len, positions.values())) > 4
