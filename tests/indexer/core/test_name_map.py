"""Both twins of the map from names to nodes against a plain dict."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core import plain_name_map
from indexer.core.node import Node
from indexer.core.packing import pack_u64
from indexer.types import BASE_NAMESPACE, U64_MASK
from tests.effort import examples
from tests.indexer.kernels import twins

NODES = [Node(b"", None, BASE_NAMESPACE) for _ in range(3)]


@pytest.fixture(scope="module", params=twins("indexer._names", plain_name_map))
def twin(request: pytest.FixtureRequest) -> ModuleType:
    module = request.param
    assert isinstance(module, ModuleType)
    return module


_NAMES = st.one_of(
    st.integers(0, 40),
    st.integers(0, U64_MASK),
    st.integers(0, 40).map(lambda n: n << 56),
    st.integers(0, 40).map(lambda n: U64_MASK - n),
)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), _NAMES, st.integers(0, 2)),
        st.tuples(st.just("del"), _NAMES, st.just(0)),
        st.tuples(st.just("file"), st.lists(_NAMES, max_size=40), st.integers(0, 2)),
        st.tuples(st.just("file_new"), st.lists(_NAMES, max_size=40), st.integers(0, 2)),
        st.tuples(st.just("drop"), st.lists(st.integers(0, 70), max_size=60), st.just(0)),
        st.tuples(st.just("is_filed"), st.lists(_NAMES, max_size=3), st.integers(0, 2)),
        st.tuples(st.just("none"), st.lists(_NAMES, max_size=4), st.just(0)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


_FORMS: dict[str, Callable[[list[int]], Sequence[int]]] = {
    "objects": list,
    "packed": lambda names: array("Q", names),
    "a view": lambda names: memoryview(array("Q", names)),
    "backwards": lambda names: memoryview(array("Q", names[::-1]))[::-1],
}
"""How a list of names may come: the kernel looks through what lies packed in memory."""


def _do(names: Any, model: dict[int, Node], step: str, what: Any, node: Node, form: Any) -> None:
    """Take a step on a map and on its model, and compare what they say."""
    if step == "set":
        names[what] = model[what] = node
    elif step == "file":
        names.file(form(what), node)
        model.update(dict.fromkeys(what, node))
    elif step == "file_new":
        fits = len(set(what)) == len(what) and model.keys().isdisjoint(what)
        assert names.file_new(form(what), node) == fits
        model.update(dict.fromkeys(what if fits else (), node))
    elif step == "is_filed":
        assert names.is_filed(form(what), node) == all(model.get(one) is node for one in what)
    elif step == "none":
        assert names.knows_none(form(what)) == model.keys().isdisjoint(what)
    else:
        _forget(names, model, step, what, form)


def _forget(names: Any, model: dict[int, Node], step: str, what: Any, form: Any) -> None:
    if step == "del":
        assert (what in names) == (what in model)
        if what in model:
            del names[what], model[what]
        with pytest.raises(KeyError):
            del names[what]
        with pytest.raises(KeyError):
            _ = names[what]
    elif step == "drop":
        there = [name for name in dict.fromkeys(what) if name in model]
        names.drop_all(form(there))
        for name in there:
            del model[name]
        for name in what[:1]:  # now it is not
            with pytest.raises(KeyError):
                names.drop_all(form([name]))
    else:
        for name in [*names]:
            del names[name]
        model.clear()


@settings(max_examples=examples(300))
@given(steps=_STEPS, form=st.sampled_from([*_FORMS]))
def test_it_is_a_dict(twin: ModuleType, steps: list[Any], form: str) -> None:
    names, model = twin.NameMap(), dict[int, Node]()
    for step, what, number in steps:
        _do(names, model, step, what, NODES[number], _FORMS[form])
        assert len(names) == len(model)
        assert bool(names) == bool(model)
        for name in (what,) if isinstance(what, int) else what:
            assert names.get(name) is model.get(name)
    assert {name: names[name] for name in names} == model


@pytest.mark.parametrize("what", ["file", "file_new", "drop_all", "is_filed", "knows_none"])
def test_what_cannot_be_a_name_changes_nothing(twin: ModuleType, what: str) -> None:
    if "plain" in twin.__name__:
        pytest.skip("a dict takes any key")
    names, node = twin.NameMap(), NODES[0]
    nodes = (node,) if "file" in what else ()
    with pytest.raises((OverflowError, TypeError)):
        getattr(names, what)([U64_MASK + 1], *nodes)
    assert not names
    with pytest.raises((OverflowError, TypeError)):
        getattr(names, what)([-1], *nodes)
    if what == "file_new":
        with pytest.raises((OverflowError, TypeError)):
            names.file_new([1, 2, "a"], node)
    assert not names


@given(
    run=st.lists(_NAMES, min_size=1, max_size=90, unique=True),
    before=st.lists(_NAMES, max_size=3),
    agree=st.integers(0, 100),
    behind=st.lists(_NAMES, max_size=3),
    form=st.sampled_from([*_FORMS]),
)
def test_the_end_of_a_run_is_forgotten(
    twin: ModuleType,
    run: list[int],
    before: list[int],
    agree: int,
    behind: list[int],
    form: str,
) -> None:
    names = twin.NameMap()
    names.file(run, NODES[0])
    told = [*before, *run[::-1][:agree], *behind]
    gone = 0
    while True:
        count = names.drop_tail(
            _FORMS[form](told), len(before) + gone, pack_u64(run[: len(run) - gone])
        )
        gone += count
        if not count:
            break
    expected = 0
    while expected < min(len(run) - 1, len(told) - len(before)) and (
        told[len(before) + expected] == run[-1 - expected]
    ):
        expected += 1
    assert gone == expected
    assert sorted(names) == sorted(run[: len(run) - gone])


def test_many_names_come_and_go(twin: ModuleType) -> None:
    names, node = twin.NameMap(), NODES[0]
    empty, references = names.nbytes, sys.getrefcount(node)
    names.file(range(100_000), node)
    assert len(names) == 100_000
    assert sys.getrefcount(node) == references + 100_000
    full = names.nbytes
    for name in range(0, 100_000, 2):
        del names[name]
    assert all((name in names) == bool(name % 2) for name in range(100_000))
    left = len(names)
    while names:
        names.pop_some(70)
        assert len(names) == max(left - 70, 0)
        left = len(names)
    names.pop_some(1)
    assert sys.getrefcount(node) == references
    assert names.nbytes <= full
    if "plain" not in twin.__name__:
        assert full < 32 * 100_000, "no object per name"
        assert names.nbytes == empty


def test_the_nodes_go_with_the_map(twin: ModuleType) -> None:
    names, node = twin.NameMap(), NODES[0]
    references = sys.getrefcount(node)
    names.file([0, U64_MASK, 7], node)
    del names
    assert sys.getrefcount(node) == references


def test_no_engine_can_know_where_a_name_will_lie(twin: ModuleType) -> None:
    """Or one could choose names that all want the same place, each of them a search for another.

    Nor does one map know it of another: filed in its order, names would all crowd at the front.
    """
    if "plain" in twin.__name__:
        pytest.skip("a dict looks elsewhere after a few steps, wherever names would lie at first")
    names, others = twin.NameMap(), twin.NameMap()
    for filed in (names, others):
        filed.file(range(1000), NODES[0])
    assert sorted(names) == sorted(others)
    assert [*names] != [*others]
