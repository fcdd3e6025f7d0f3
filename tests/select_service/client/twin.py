"""The methods that nobody writes: `make twin`, or `python -m tests.select_service.client.twin`.

An operation that is one call of the driver (`get(…).calls(…)` in the table of operations) gets its
methods in the embedded service and in the clients from here, unless they are written by
hand there. `test_twin.py` fails when a file differs from what is made here.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import select_service
from select_service.client.verbs import Verbs
from select_service.edge.embedded import SelectionService
from select_service.edge.http.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from select_service.edge.http.api import Handler
    from select_service.edge.routing import Route

COMMAND: Final = "make twin"
DOC_LINE_MAX: Final = 86  # in a docstring of one line
PACKAGE: Final = Path(select_service.__file__).parent
CLIENT: Final = PACKAGE / "client"
MADE_OF_TABLE: Final = "made out of the table of operations by `make twin`."
EMBEDDED_HEAD: Final = f'''"""Plain operations of an embedded service: {MADE_OF_TABLE}

`http/routes.py` has the table; what is not just one call of the driver is in `embedded.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from select_service.edge.arguments import taken
from select_service.edge.driver.driver import Driver
from select_service.edge.embedded_operation import operation
'''
EMBEDDED_CLASS: Final = '''

class EmbeddedOperations:
    """What an embedded service does as a route does it, without more."""

    driver: Driver
'''
CLIENT_HEAD: Final = f'''"""Plain operations of the clients: {MADE_OF_TABLE}

What is not just one request is in `verbs.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.client import calls
from select_service.client.verb import Verb
from select_service.client.verbs import Verbs
'''
CLIENT_CLASS: Final = '''
if TYPE_CHECKING:
    from select_service.client.core.exchange import Run


class Operations(Verbs):
    """What can be asked of the service in one request."""
'''


def embedded() -> str:
    """The text of the plain operations of an embedded service."""
    lines = [EMBEDDED_HEAD, *_imports(SelectionService), EMBEDDED_CLASS]
    for route, path, body in _plain(SelectionService):
        taken = ["self", *(f"{name}: {kind}" for name, kind in path.items())]
        given = [*path]
        if body is not None and route.takes is not None:
            taken.append(f"{body}: {route.takes.__name__} | Mapping[str, Any]")
            given.append(f'taken("{body}", {body}, {route.takes.__name__})')
        asked = _asked(route)
        taken += asked.values()
        given += [f"{name}={name}" for name in asked]
        lines += [
            "    @operation",
            f"    async def {route.name}({', '.join(taken)}) -> {_answer_type(route)}:",
            _doc(route, f"{route.summary}\n\n{_said(route)}."),
            f"        return self.driver.{route.name}({', '.join(given)})\n",
        ]
    return _formatted("\n".join(lines))


def client() -> str:
    """The text of the plain operations of the clients."""
    lines = [CLIENT_HEAD, *_imports(Verbs), CLIENT_CLASS]
    for route, path, body in _plain(Verbs):
        taken = ["self", *(f"{name}: {kind}" for name, kind in path.items())]
        url = re.sub(r"\{\w+\}", "{}", route.pattern).format(
            *(
                f"{{{name if kind == 'int' else f'calls.quoted({name})'}}}"
                for name, kind in path.items()
            )
        )
        sent = f'"{route.method}", {"f" if path else ""}"{url}"'
        asked = _asked(route)
        if asked:
            sent += f" + calls.query({', '.join(f'{name}={name}' for name in asked)})"
        if body is not None and route.takes is not None:
            taken.append(f"{body}: {route.takes.__name__}")
            sent += f", calls.given({body})"
        taken += asked.values()
        text = f"{_said(route)}: {route.summary[0].lower()}{route.summary[1:]}"
        if len(text) > DOC_LINE_MAX:
            text = f"{_said(route)}.\n\n{route.summary}"
        lines += [
            "    @Verb",
            f"    def {route.name}({', '.join(taken)}) -> Run[{_answer_type(route)}]:",
            _doc(route, text),
            f"        return self._answered({sent}, kind={_answer_type(route)})\n",
        ]
    return _formatted("\n".join(lines))


def _plain(written: type) -> Iterator[tuple[Route[Handler], dict[str, str], str | None]]:
    """Yield the operations to be made, the arguments of each path, and the name of its body."""
    for route in ROUTES:
        if route.calls is None or route.of_process or route.name in vars(written):
            continue
        parameters = list(inspect.signature(route.calls).parameters.values())[1:]
        opens = route.pattern.count("{")
        path = {one.name: str(one.annotation) for one in parameters[:opens]}
        yield route, path, None if route.takes is None else parameters[opens].name


def _asked(route: Route[Handler]) -> dict[str, str]:
    """What the query may ask for: arguments with their defaults, by name."""
    assert route.calls is not None
    parameters = inspect.signature(route.calls).parameters
    return {name: str(parameters[name]).replace("'", "") for name in route.query}


def _imports(written: type) -> Iterator[str]:
    for route, _, _ in _plain(written):
        for kind in (route.takes, route.answers, *typing.get_args(route.answers)):
            if isinstance(kind, type) and kind.__module__.startswith("select_service."):
                yield f"from {kind.__module__} import {kind.__name__}"


def _answer_type(route: Route[Handler]) -> str:
    assert route.calls is not None
    return str(route.calls.__annotations__["return"])


def _said(route: Route[Handler]) -> str:
    return f"{route.method} {re.sub(r'{.*?}', '{id}', route.pattern)}"


def _doc(route: Route[Handler], text: str) -> str:
    if "{worker_id}" in route.pattern:
        text += "\n\nRaises:\n    WorkerNotFound: there is none with this id."
    end = "\n" if "\n" in text else ""
    return textwrap.indent(f'"""{text}{end}"""', " " * 8)


def _formatted(text: str) -> str:
    for command in (("check", "--quiet", "--select=I,F401", "--fix"), ("format",)):
        ruff = (sys.executable, "-m", "ruff", *command, "--stdin-filename=twin.py", "-")
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


FILES: Final[dict[Path, Callable[[], str]]] = {
    PACKAGE / "edge/embedded_operations.py": embedded,
    CLIENT / "operations.py": client,
}


if __name__ == "__main__":
    for file, text_of in FILES.items():
        file.write_text(text_of(), "utf-8")
