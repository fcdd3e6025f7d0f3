"""What moving blocks costs, as it is said on the command line."""

from __future__ import annotations

import pytest

from select_service.settings import ConfigError
from select_service.settings.layers import read_values


def test_names_of_domains_are_read_without_blanks() -> None:
    read = read_values({"kv-transfer-cost-by-domain": "rack = 0.02, zone=0.05"})
    assert read["kv_transfer_cost_by_domain"] == {"rack": 0.02, "zone": 0.05}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kv-transfer-cost-by-domain", "=0.1"),
        ("kv-transfer-cost-by-domain", '{" ": 0.1}'),
        ("kv-transfer-cost-by-domain", "zone=0.1,zone =0.2"),
        ("kv-transfer-cost-by-domain", "zone=nan"),
        ("kv-transfer-cost-by-domain", "zone=true"),
        ("kv-transfer-cost-per-block", "1e308"),  # times some blocks it is no number
    ],
)
def test_costs_that_say_nothing_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=name.replace("-", "_")):
        read_values({name: said})
