"""How selectors and workers of one Ray cluster find each other: a named actor, and its client.

`RegistryActor` knows which have reported within the last seconds, and nothing else: what it forgets
when it dies is reported again within a beat. `serve_ray.py` and `serve_worker.py` report
themselves, `client_pool.py` asks which are there.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE: Final = "select-service"
"""Namespace of the actor; several independent services in one cluster have one each."""

BEAT_S: Final = 1.0
"""Interval at which all report."""

SILENCE_S: Final = 5.0
"""What has not reported for this long is gone: a few beats, and a garbage collection."""

PRESENT_MAX: Final = 10_000
"""Limit on selectors, and on workers; one beyond it is refused and tries again."""

ANSWER_S: Final = 5.0
"""Longest wait for the actor, which may have to be restarted elsewhere."""

_NAME: Final = "meeting-point"


class Present(Struct, frozen=True):
    """All that are present."""

    selectors: dict[str, tuple[str, str]]
    """By name: the HTTP address, and the endpoint of the replica plane."""

    workers: dict[int, dict[str, Any]]
    """By id: bodies of POST /workers."""


class RegistryActor:
    """The actor; a plain object in tests."""

    def __init__(
        self, silence_s: float = SILENCE_S, clock: Callable[[], float] = monotonic
    ) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._selectors: dict[str, tuple[float, tuple[str, str]]] = {}
        self._workers: dict[int, tuple[float, dict[str, Any]]] = {}

    def selector(self, name: str, url: str, endpoint: str) -> Present:
        """Report a selector; returns the others that are present."""
        self._note(self._selectors, name, (url, endpoint))
        return self.present()

    def worker(self, spec: dict[str, Any]) -> Present:
        """Report a worker, as it would register; returns the others that are present."""
        self._note(self._workers, spec["worker_id"], spec)
        return self.present()

    def leave(self, selector: str | None = None, worker_id: int | None = None) -> None:
        """Report that one leaves."""
        if selector is not None:
            self._selectors.pop(selector, None)
        if worker_id is not None:
            self._workers.pop(worker_id, None)

    def present(self) -> Present:
        """Return all that have reported lately."""
        since = self._clock() - self._silence_s
        books: tuple[dict[Any, tuple[float, Any]], ...] = (self._selectors, self._workers)
        for book in books:
            for key in [key for key, (noted_at, _) in book.items() if noted_at < since]:
                del book[key]
        return Present(
            {name: endpoint for name, (_, endpoint) in self._selectors.items()},
            {worker_id: spec for worker_id, (_, spec) in self._workers.items()},
        )

    def _note(self, book: dict[Any, tuple[float, Any]], key: object, value: object) -> None:
        if key not in book and len(book) >= PRESENT_MAX:
            raise RuntimeError(f"{len(book)} are here already")
        book[key] = (self._clock(), value)


class SelectorRegistry:
    """Access to the actor from any process of the cluster; starts it if there is none.

    Awaited on one event loop. After any failure the next call looks up the actor again.
    """

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self._namespace = namespace
        self._actor: Any = None

    async def selector(self, name: str, url: str, endpoint: str) -> Present:
        """Report a selector, see `RegistryActor`."""
        present: Present = await self._ask("selector", name, url, endpoint)
        return present

    async def worker(self, spec: dict[str, Any]) -> Present:
        """Report a worker."""
        present: Present = await self._ask("worker", spec)
        return present

    async def present(self) -> Present:
        """Ask which are present."""
        present: Present = await self._ask("present")
        return present

    async def leave(self, selector: str | None = None, worker_id: int | None = None) -> None:
        """Report that one leaves."""
        await self._ask("leave", selector, worker_id)

    async def _ask(self, verb: str, *args: object) -> Any:

        try:
            async with asyncio.timeout(ANSWER_S):
                if self._actor is None:
                    # ray's name lookup blocks
                    self._actor = await asyncio.to_thread(_find, self._namespace)
                return await getattr(self._actor, verb).remote(*args)
        except BaseException:
            self._actor = None
            raise


def _find(namespace: str) -> Any:
    import ray  # the extra `ray`

    return (
        ray.remote(RegistryActor)
        .options(
            name=_NAME,
            namespace=namespace,
            get_if_exists=True,
            lifetime="detached",  # it outlives the process that created it
            max_restarts=-1,
            num_cpus=0,
        )
        .remote()
    )
