"""What a recording says of loads is believed only as far as a ledger could have counted it."""

from __future__ import annotations

import numpy as np
import pytest

from select_service.core.recording.decoder import BadRecording
from select_service.simulator.core.recorded_state import RecordedLedger

RANKS = 2
TURNOVER = 9


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("at", range(20))
def test_loads_that_no_ledger_counts_are_refused(at: int, number: float) -> None:
    """Each number of the longest form: seven columns, the totals, the pace and the padding."""
    ledger, numbers = RecordedLedger(RANKS), np.zeros(20)
    ledger.load(numbers.tobytes())
    numbers[at] = number
    if at == TURNOVER and number == float("inf"):
        ledger.load(numbers.tobytes())  # nothing was asked for yet
        return
    with pytest.raises(BadRecording, match="loads that no ledger counts"):
        ledger.load(numbers.tobytes())
