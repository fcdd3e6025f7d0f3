"""The doctor's memory, without sockets: windows, runs, what is found and what is only suspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import UNSET

from indexer.core.index import KvIndex
from indexer.types import BASE_NAMESPACE, Scope
from select_service.core.diagnostics import prompt_checks
from select_service.core.diagnostics.causes import CAUSES, OF_THE_COMMAND, Cause
from select_service.core.diagnostics.fleet_checks import server_of
from select_service.core.diagnostics.growth import WINDOW_S, CounterGrowth
from select_service.core.diagnostics.prompt_checks import Owner, PromptChecks
from select_service.core.diagnostics.prompt_sample import PromptSample
from select_service.core.diagnostics.stream_checks import RUN_S, FailureRun
from select_service.core.diagnostics.suspicions import FindingChange, Suspicions
from select_service.types.doctor import Subject

SCOPE = Scope("m", "t")
LATE = next(cause for cause in CAUSES if cause.after_s == 10.0)
AT_ONCE = next(cause for cause in CAUSES if not cause.after_s)


def concluded(suspicions: Suspicions, now: float) -> list[FindingChange]:
    steps: Iterator[None] = suspicions.conclude(now)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def test_codes_are_unique_and_every_cause_has_its_words() -> None:
    every = (*CAUSES, *OF_THE_COMMAND)
    assert len({cause.code for cause in every}) == len(every)
    for cause in every:
        assert cause.code == cause.code.lower().replace("_", "-").replace(" ", "-")
        assert cause.why.endswith(".")
        assert cause.remedy.endswith(".")


def test_growth_is_what_came_lately() -> None:
    growth = CounterGrowth((100,), 0.0)
    assert growth.of((103,), 10.0) == (3,)
    assert growth.of((103,), WINDOW_S) == (3,)
    assert growth.of((104,), WINDOW_S + 10) == (4,)
    assert growth.of((104,), 2 * WINDOW_S) == (1,)  # three are of the window before
    assert growth.of((104,), 3 * WINDOW_S) == (0,)
    assert growth.of((999,), 9 * WINDOW_S) == (0,)  # nobody looked: it may be of any time
    assert growth.of((1000,), 9 * WINDOW_S + 1) == (1,)


def test_a_run_is_counted_until_something_goes_well() -> None:
    run = FailureRun()
    assert run.go_on(0, 2, 0.0) == 2
    assert run.go_on(0, 5, 1.0) == 5
    assert run.go_on(0, 5, 1000.0) == 5  # idle, and no better
    assert run.go_on(1, 6, 1001.0) == 0
    assert run.go_on(1, 9, 1002.0) == 0  # it has worked: it may work again
    assert run.go_on(1, 9, 1002.0 + RUN_S) == 3
    assert run.go_on(2, 9, 1003.0 + RUN_S) == 0


def test_a_suspicion_becomes_a_finding_in_time() -> None:
    suspicions, subject = Suspicions(9), Subject(worker_id=1)
    suspicions.begin()
    suspicions.suspect(LATE, subject, "x", 0.0)
    assert concluded(suspicions, 0.0) == []
    assert suspicions.report(0.0).findings == []
    (young,) = suspicions.report(4.0).suspected
    assert (young.since_s, young.finding_in_s) == (4.0, LATE.after_s - 4.0)
    suspicions.begin()
    suspicions.suspect(LATE, subject, "y", 10.0)
    (came,) = concluded(suspicions, 10.0)
    assert (came.code, came.what, came.is_there) == (LATE.code, "y", True)
    (finding,) = suspicions.report(12.5).findings
    assert (finding.what, finding.since_s, finding.finding_in_s) == ("y", 12.5, UNSET)
    suspicions.begin()
    (went,) = concluded(suspicions, 20.0)
    assert (went.code, went.is_there) == (LATE.code, False)
    suspicions.begin()
    suspicions.suspect(LATE, subject, "z", 30.0)
    assert concluded(suspicions, 30.0) == []  # it starts again


def test_a_round_that_was_broken_off_says_nothing() -> None:
    suspicions = Suspicions(9)
    suspicions.begin()
    suspicions.suspect(AT_ONCE, Subject(worker_id=1), "x", 0.0)
    suspicions.begin()
    suspicions.suspect(AT_ONCE, Subject(worker_id=2), "y", 1.0)
    assert [change.subject.worker_id for change in concluded(suspicions, 1.0)] == [2]


def test_the_gravest_are_told_and_the_rest_counted() -> None:
    suspicions = Suspicions(3)
    warning = next(c for c in CAUSES if c.severity == "warning" and not c.after_s)
    error = next(c for c in CAUSES if c.severity == "error" and not c.after_s)
    suspicions.begin()
    for number in range(4):
        suspicions.suspect(warning, Subject(worker_id=number), "w", 0.0)
    suspicions.suspect(error, Subject(), "e", 0.0)
    concluded(suspicions, 0.0)
    report = suspicions.report(0.0)
    assert [one.severity for one in report.findings] == ["error", "warning", "warning"]
    assert report.left_out == suspicions.left_out == 2
    assert suspicions.counts()[warning.code] == 4


def test_a_thousand_of_a_kind_leave_room_for_the_others() -> None:
    """A fleet whose events nobody reaches must not hide that a replica speaks another version."""
    many, few, mild = _one_of_each("error")[0], _one_of_each("error")[1], _one_of_each("warning")[0]
    suspicions = Suspicions(10)
    suspicions.begin()
    for number in range(1000):
        suspicions.suspect(many, Subject(worker_id=number), "many", 0.0)
    for number in range(2):
        suspicions.suspect(few, Subject(worker_id=number), "few", 0.0)
    for number in range(20):
        suspicions.suspect(mild, Subject(worker_id=number), "mild", 0.0)
    concluded(suspicions, 0.0)
    report = suspicions.report(0.0)
    assert Counter(one.what for one in report.findings) == {"many": 4, "few": 2, "mild": 4}
    assert [one.severity for one in report.findings] == ["error"] * 6 + ["warning"] * 4
    assert report.left_out == 1012


def _one_of_each(severity: str) -> list[Cause]:
    return [one for one in CAUSES if one.severity == severity and not one.after_s]


def sample(number: int, at: float, rank: int = 0) -> PromptSample:
    return PromptSample(
        *(SCOPE, 1, rank, at, number.to_bytes(8, "little"), 1, 1, 16, "hashes"),
        *(BASE_NAMESPACE, []),
    )


def verdict(watch: PromptChecks, index: KvIndex, now: float) -> list[Cause]:
    stored: dict[Owner, int] = {SCOPE: 10**6}
    found = watch.suspects(lambda _: index, stored, lambda _: False, now)
    return [one[1] for one in found if one is not None]


def test_what_is_remembered_of_prompts_is_bounded() -> None:
    watch, index = PromptChecks(), KvIndex(16)
    for number in range(prompt_checks.SEEN_MAX + 100):
        watch.judge(sample(number, 0.0, rank=number), index, {})
    assert len(watch._seen) == prompt_checks.SEEN_MAX
    for number in range(prompt_checks.SEEN_MAX, prompt_checks.SEEN_MAX + 100):
        for _ in range(3):
            watch.judge(sample(number, 100.0, rank=number), index, {})
    assert len(watch._verdicts) <= prompt_checks.OWNERS_MAX
    assert max(map(len, watch._verdicts.values())) <= prompt_checks.VERDICTS_MAX


def test_old_verdicts_say_nothing() -> None:
    watch, index = PromptChecks(), KvIndex(16)
    for at in (0.0, 50.0, 60.0):
        for number in range(4):
            watch.judge(sample(number, at), index, {})
    assert len(verdict(watch, index, 61.0)) == 1
    assert verdict(watch, index, 61.0 + prompt_checks.VERDICTS_S) == []
    assert not watch._verdicts


def test_a_scope_that_is_gone_is_forgotten() -> None:
    watch, index = PromptChecks(), KvIndex(16)
    for at in (0.0, 50.0, 60.0):
        for number in range(4):
            watch.judge(sample(number, at), index, {})
    assert [*watch.suspects(lambda _: None, {}, lambda _: False, 61.0)]
    assert not watch._verdicts


def test_what_names_a_server() -> None:
    assert server_of("http://h:1/adapter-a") == server_of("http://h:1/adapter-b") == "http://h:1"
    assert server_of("http://h:1") != server_of("http://h:2")
    assert server_of("ray://replica#1") == "ray://replica#1"
    assert server_of("opaque") == "opaque"
