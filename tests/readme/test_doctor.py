"""What deploy/docs/operating.md shows of `select-service doctor` is what it prints."""

from __future__ import annotations

from select_service.core.diagnostics.causes import SALT_MISMATCH
from select_service.doctor.query import Answer, ReachableWorker
from select_service.doctor.report import format_report
from select_service.types.doctor import Finding, Subject
from tests.readme import document

WIDTH = 100
COMMAND = "$ select-service doctor\n"


def printed() -> str:
    finding = Finding(
        *(SALT_MISMATCH.code, SALT_MISMATCH.severity),
        Subject(model_name="default", tenant_id="default"),
        "12 prompts came again (5 different ones), and none matched",
        *(SALT_MISMATCH.why, SALT_MISMATCH.remedy),
        120.0,
    )
    answer = Answer(
        ready=True, schedulable_workers=2, workers=[ReachableWorker(1), ReachableWorker(2)]
    )
    return COMMAND + format_report("http://localhost:8092", answer, [finding], WIDTH)


def test_the_report_shown() -> None:
    blocks = document.blocks(document.DOCS / "operating.md")
    (shown,) = (text for _, text in blocks if text.startswith(COMMAND))
    assert shown == printed()
