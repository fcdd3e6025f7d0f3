"""Both clients have the same calls."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import pytest

from select_service.client import AsyncClient, Client
from tests.select_service.client import twin

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("file", twin.FILES, ids=lambda file: file.stem)
def test_what_is_made_is_up_to_date(file: Path) -> None:
    assert file.read_text("utf-8") == twin.FILES[file](), f"run: {twin.COMMAND}"


def test_both_have_the_same_calls() -> None:
    def calls(client: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(one).parameters)
            for name, one in inspect.getmembers(client, inspect.isfunction)
            if not name.startswith("_") and name not in {"close", "aclose"}
        }

    assert calls(AsyncClient) == calls(Client)
    assert "reserve_pair" in calls(Client)
