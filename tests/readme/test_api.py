"""deploy/reference/api.md is what the service says of itself."""

from __future__ import annotations

from select_service.edge.http.routes import ROUTES
from tests.readme import api
from tests.readme.document import DOCS


def test_the_reference_is_up_to_date() -> None:
    assert api.FILE.read_text("utf-8") == api.written(), f"run: {api.COMMAND}"


def test_every_route_is_at_a_glance() -> None:
    lines = (DOCS / "routes.md").read_text("utf-8").splitlines()
    missing = [
        f"{route.method} {route.pattern}"
        for route in ROUTES
        if not any(
            all(
                word in line
                for word in (route.method, *route.pattern.split("/"))
                if "{" not in word
            )
            for line in lines
        )
    ]
    assert not missing, "deploy/docs/routes.md is written by hand"
