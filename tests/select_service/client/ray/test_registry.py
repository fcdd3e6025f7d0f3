"""Who says that it is there is there for a while; who says goodbye is gone at once."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.client.ray import registry
from select_service.client.ray.registry import RegistryActor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_selector_learns_of_every_other() -> None:
    point = RegistryActor()
    point.selector("a", "http://a", "tcp://a")
    present = point.worker({"worker_id": 2**64 - 1, "block_size": 16})
    assert present.selectors == {"a": ("http://a", "tcp://a")}
    assert present.workers == {2**64 - 1: {"worker_id": 2**64 - 1, "block_size": 16}}
    assert point.selector("b", "http://b", "tcp://b").selectors.keys() == {"a", "b"}


def test_silence_and_goodbyes() -> None:
    clock = Clock()
    point = RegistryActor(silence_s=5.0, clock=clock)
    point.selector("a", "http://a", "tcp://a")
    point.selector("b", "http://b", "tcp://b")
    point.worker({"worker_id": 1})
    point.worker({"worker_id": 2})
    point.leave(selector="a")
    point.leave(worker_id=1)
    point.leave(selector="never was", worker_id=9)
    clock.now = 4.0
    point.worker({"worker_id": 2})
    assert point.present().selectors.keys() == {"b"}
    clock.now = 6.0
    assert point.present().selectors == {}
    assert point.present().workers.keys() == {2}


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PRESENT_MAX", 2)
    point = RegistryActor()
    specs: list[dict[str, Any]] = [{"worker_id": n} for n in range(3)]
    point.worker(specs[0])
    point.worker(specs[1])
    with pytest.raises(RuntimeError, match="2 are here already"):
        point.worker(specs[2])
    point.worker(specs[1])  # whoever is known stays
