"""Plots can be read: every axis says what its places stand for."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from select_service.simulator import page, plots
from select_service.simulator.plots import Series, bars, lines, sample, stacked


@pytest.mark.parametrize(
    ("low", "high"),
    [(213.2, 213.2), (31.0, 38.0), (20.0, 80.0), (1.0, 4e4), (1e6, 9e9), (0.5, 3.0)],
)
def test_a_logarithmic_axis_has_marks_between_its_ends(low: float, high: float) -> None:
    sheet = lines("t", [Series("s", [(low, 0.0), (high, 1.0)])], x="ms", y="y", log_x=True)
    marks = re.findall(r'<text x="([\d.]+)" y="254" class="v">([\d.,]+)</text>', sheet)
    assert 2 <= len(marks) <= 12
    values = [float(text.replace(",", "")) for _, text in marks]
    assert values == sorted(set(values)), "as people write numbers, one of each"
    assert all(low * 0.99 <= value <= 10 * max(high, low) for value in values)
    places = [float(at) for at, _ in marks]
    assert all(b - a > 20 for a, b in pairwise(places)), "none on another"


def test_dots_are_distinct_without_colours_and_stand_on_no_number() -> None:
    """A plot of dots has no dashes: the signs of a planner's replay, two of them, were alike."""
    series = [Series(str(at), [(0.5 + at, 100.0)], "dots") for at in range(8)]
    drawn = lines("Price", series, x="GPU-hours", y="in time, %")
    signs = re.findall(r'<path d="([^"]+)" transform="translate\(([\d.]+) ', drawn)
    assert len({sign for sign, _ in signs}) == 8
    assert all(float(at) > plots._LEFT + 5 for _, at in signs)


def test_bars_have_their_names_and_values_beside_them() -> None:
    names, values = ["kv-cost", "a<b", "oracle"], [0.9753, 12_345.0, 99.7]
    drawn = bars("Spread", names, values, x="")
    assert re.findall(r'class="y">([^<]+)<', drawn) == ["kv-cost", "a&lt;b", "oracle"]
    assert re.findall(r'<text x="[\d.]+" y="[\d.]+">([^<]+)<', drawn) == ["0.975", "12,345", "99.7"]


@pytest.mark.parametrize("most", [0.000123, 99.7, 1_834_567.0, 12_345_678.0, 1_234_567_890.0])
def test_the_value_beside_the_longest_bar_is_on_the_sheet(most: float) -> None:
    """A replay of an hour has millions of tokens."""
    drawn = bars("Tokens to prefill", ["recorded", "other weights"], [most, most / 2], x="tokens")
    for begin, text in re.findall(r'<text x="([\d.]+)" y="[\d.]+">([^<]+)<', drawn):
        assert float(begin) + 7 * len(text) <= 460, text
    marks = re.findall(r'<text x="([\d.]+)" y="[\d.]+" class="v">([-\d.,e M]+)<', drawn)
    for (left, one), (right, other) in pairwise(marks):
        assert float(right) - float(left) > 3.5 * len(one + other), (one, other)


def looks(drawn: str) -> set[str]:
    """What is left of some lines or layers where nobody sees a colour or a place."""
    bare = re.sub(r"#[0-9a-f]{6}", "", drawn)
    bare = re.sub(r'<title>.*?</title>|transform="[^"]*"| (?:x|y|width|height)="[^"]*"', "", bare)
    return {bare}


def test_lines_are_distinct_without_their_colours() -> None:
    every = range(len(plots.COLOURS))
    legends = [looks(sample(at)) for at in every]
    assert len(set.union(*legends)) == len(every)
    names = [f"line-{at}" for at in every]
    drawn = lines("t", [Series(name, [(0.0, 1.0), (1.0, 2.0)]) for name in names], x="s", y="")
    shown = re.findall(
        r'<polyline [^>]*?(?:stroke-dasharray="([\d ]+)" )?points=.*?<path d="([^"]+)"', drawn
    )
    assert len({*shown}) == len(every)
    for at, (dashes, sign) in enumerate(shown):
        assert f'stroke-dasharray="{dashes or "none"}"' in sample(at)
        assert f'd="{sign}"' in sample(at)


def test_layers_of_bars_are_distinct_without_their_colours() -> None:
    every = range(8)
    assert len(set.union(*(looks(sample(at, filled=True)) for at in every))) == len(every)
    drawn = stacked("t", ["one"], [(f"layer {at}", [1.0]) for at in every], x="%")
    assert re.findall(r"url\(#(hatch-\d)\)", drawn) == [f"hatch-{at}" for at in every[1:]]
    whole = page.page("t", [drawn], verdict="v")
    assert all(f'id="hatch-{at}"' in whole for at in every[1:])
    assert "hatch" not in page.page("t", [], verdict="v")


def light(colour: str) -> float:
    """The relative luminance by WCAG."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    bent = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), bent, strict=True))


def test_colours_stand_out_from_the_light_page_and_from_the_dark_one() -> None:
    pages = [re.findall(r"--page:(#\w+)", style)[0] for style in (page._LIGHT, page._DARK)]
    white, dark = (light(one if len(one) == 7 else "#ffffff") for one in pages)
    for colour in plots.COLOURS:
        assert (white + 0.05) / (light(colour) + 0.05) > 2.8, colour
        assert (light(colour) + 0.05) / (dark + 0.05) > 3, colour
