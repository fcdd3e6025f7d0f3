"""Pins of scopes beside a plain dict."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from indexer.types import Scope
from select_service.core.fleet import pins
from select_service.core.fleet.pins import Pins

names = st.sampled_from(["", "a", "ab", "b", "ä", "\x00", "a\x00"])
scopes = st.builds(Scope, names, names)
sizes = st.sampled_from([1, 16, (1 << 32) - 1])


@given(st.lists(st.tuples(scopes, sizes | st.none(), st.booleans())))
def test_pins_are_a_dict_that_forgets_its_oldest(
    steps: list[tuple[Scope, int | None, bool]],
) -> None:
    kept: dict[Scope, tuple[int, bool]] = {}
    with mock.patch.object(pins, "PINS_MAX", 3):
        found = Pins()
        for scope, size, is_eagle in steps:
            kept.pop(scope, None)
            if size is None:
                found.discard(scope)
            else:
                found.put(scope, size, is_eagle=is_eagle)
                kept[scope] = size, is_eagle
                if len(kept) > 3:
                    del kept[next(iter(kept))]
            assert len(found) == len(kept)
            assert (found.nbytes > 0) == bool(kept)
            for one in {scope for scope, _, _ in steps}:
                assert found.get(one) == kept.get(one)
