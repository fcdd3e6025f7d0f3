"""Collapsed stacks and what the note makes of them."""

from __future__ import annotations

import pytest

from bench.profile.stacks import collapsed, merged, note, parse, shares

TEXT = """\
main (a.py:1);work (b.py:10);hash (c.py:3) 6
main (a.py:2);work (b.py:11) 3

main (a.py:2) 1
"""


def test_lines_become_functions() -> None:
    assert parse(TEXT) == [
        (("main (a.py)", "work (b.py)", "hash (c.py)"), 6),
        (("main (a.py)", "work (b.py)"), 3),
        (("main (a.py)",), 1),
    ]
    assert parse("send (libc.so);<module> (x:y.py:4) 2") == [
        (("send (libc.so)", "<module> (x:y.py)"), 2)
    ]
    with pytest.raises(ValueError, match="invalid literal"):
        parse("no count")


def test_stacks_that_differ_in_lines_alone_are_one() -> None:
    text = "a (x.py:1);b (y.py:2) 3\na (x.py:1) 4\na (x.py:9);b (y.py:8) 2\n"
    stacks = merged(parse(text))
    assert stacks == [(("a (x.py)", "b (y.py)"), 5), (("a (x.py)",), 4)]
    assert parse(collapsed(stacks)) == stacks


def test_shares_are_by_own_time() -> None:
    assert [(one.function, one.own, one.within) for one in shares(parse(TEXT))] == [
        ("hash (c.py)", 0.6, 0.6),
        ("work (b.py)", 0.3, 0.9),
        ("main (a.py)", 0.1, 1.0),
    ]


def test_recursion_counts_once() -> None:
    found = shares(parse("f (a.py:1);f (a.py:2);g (a.py:3) 4"))
    assert {one.function: one.within for one in found} == {"f (a.py)": 1.0, "g (a.py)": 1.0}


def test_the_note_names_the_largest_first_and_leaves_out_crumbs() -> None:
    text = note("W1", {"commit": "abc"}, parse(TEXT + "main (a.py:1);crumb (d.py:1) 0\n"))
    assert text.startswith("# W1\n\n* commit: abc\n* samples: 10\n")
    assert text.index("`hash (c.py)`") < text.index("`work (b.py)`")
    assert "| 60.0% | 60.0% | `hash (c.py)` |" in text
    assert "crumb" not in text


def test_the_note_names_our_own_functions_by_what_they_call() -> None:
    stacks = parse(
        "run (uvloop);answer (select_service/edge/a.py:1);send (libc.so) 5\n"
        "run (uvloop);answer (select_service/edge/a.py:2);find (indexer/core/b.pyx:1) 3\n"
        "run (uvloop) 2\n"
    )
    _, _, ours = note("W1", {}, stacks).partition("by time with callees:")
    rows = [line for line in ours.splitlines() if line.startswith("| ")][2:]
    assert rows == [
        "| 80.0% | `answer (select_service/edge/a.py)` |",
        "| 30.0% | `find (indexer/core/b.pyx)` |",
    ]
