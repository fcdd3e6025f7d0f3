"""The picture of policies over load can be read without colours, as reports can."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from bench.policy.terms import PLOTTED, POLICIES, Cell, picture_of
from select_service.simulator.plots import sample
from select_service.simulator.statistics import estimate


def test_the_legend_has_the_dashes_and_the_sign_of_each_line() -> None:
    metrics = {name: estimate([1.0]) for name, _ in PLOTTED}
    cells = [
        Cell(scene="trace", load=load, workers=8, policy=policy, metrics=metrics)
        for policy in POLICIES
        for load in (0.5, 1.0)
    ]
    drawn = picture_of(cells)
    ET.fromstring(drawn)
    for at, policy in enumerate(POLICIES):
        assert f"{sample(at)}<text" in drawn
        assert f">{policy}</text>" in drawn
