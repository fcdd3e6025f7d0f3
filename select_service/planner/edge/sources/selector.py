"""Windows from the selectors' own /metrics: the difference of two scrapes.

After a restart of a selector all its counts are new; if it exports no start time, a restart shows
as a counter below its last value. A selector scraped for the first time has counted an unknown part
before: counting begins with its values then, and the time until then is missing, unless it joined a
name that is followed and started since. Each selector sees a part of the traffic, so counters are
summed; all of them know the load on the engines, so of gauges the largest counts, never the sum.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Final

import httpx

from indexer.http_client import http_client
from select_service.planner.core.lengths import from_buckets
from select_service.planner.edge.http_answers import OK, whole_answer
from select_service.planner.edge.selector_addresses import SelectorAddress, is_waited_for
from select_service.planner.edge.sources.selector_counters import (
    PREFIX,
    SelectorCounters,
    parse,
)
from select_service.planner.edge.sources.source import counted, moments, ratio
from select_service.planner.errors import SourceError
from select_service.planner.types import MOMENTS, Idle, Load, Missing, Value, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from select_service.planner.edge.selector_addresses import SelectorAddresses
    from select_service.planner.edge.sources.selector_counters import Since
    from select_service.planner.types import ModelKey, Moments, Reading

TIMEOUT_S: Final = 5.0
UNSEEN_S: Final = 60.0
"""Replicas that selectors know and that are not scraped are reported after so long: some may just
have begun, or ended."""
_AWAY_MAX: Final = 256
"""Selectors remembered that a name has lost: their counters go on where it leads to them again."""
_log = logging.getLogger("select_planner")


class SelectorSource:
    """Scrapes all selectors.

    Args:
        urls: of the selectors that share the traffic.
        credentials: returns the header with the bearer token, if one is required.
        client: for tests.
        clock: monotonic seconds.
        addresses: follows the names in the URLs; None: each URL is one selector.
        wall: seconds since 1970; None: start times of processes are compared with each other only.

    Attributes:
        warnings: what makes counts too low, as text.
        unseen: replicas that selectors know and that are not scraped.
    """

    def __init__(
        self,
        urls: Sequence[str],
        credentials: Callable[[], Mapping[str, str]] | None = None,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        addresses: SelectorAddresses | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._named = [SelectorAddress(url.rstrip("/"), url.rstrip("/")) for url in urls]
        self._addresses = addresses
        self._counters: dict[str, SelectorCounters] = {}  # by URL, of those asked now
        self._away: OrderedDict[str, SelectorCounters] = OrderedDict()
        self._headers = credentials
        # each scrape connects anew: a connection that is kept leads to one of several for ever
        fresh = httpx.Limits(max_keepalive_connections=0)
        self._client = client or http_client(TIMEOUT_S, has_credentials=True, limits=fresh)
        self._live: dict[ModelKey, list[float]] = defaultdict(list)
        self._lost_s = 0.0  # of earlier unknown windows
        self._clock, self._wall = clock, wall or (lambda: -math.inf)
        self._follows = addresses is not None and wall is not None
        self._looked_at = clock()
        self._since: Since | None = None  # of the window and the last look, once there is one
        self._counted: dict[ModelKey, float] = {}  # requests of this window as of the last look
        self.warnings: tuple[str, ...] = ()
        self.unseen = 0
        self._unseen_since: float | None = None

    @property
    def states(self) -> dict[str, int]:
        """How many selectors answer, do not, and share an address with others."""
        found = dict.fromkeys(("answers", "silent", "several"), 0)
        distinct = {id(one) for one in self._distinct()}
        for one in self._counters.values():
            if id(one) in distinct:
                found["several" if one.is_several else "silent" if one.error else "answers"] += 1
        return found

    async def begin(self, models: Sequence[ModelKey]) -> None:
        """Scrape once: counting begins here."""
        await self.windows(models, 0.0)

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Scrape, and return the changes since the last call.

        A failed scrape makes the whole interval missing, as that selector's share of the traffic is
        unknown. The next known window then covers that time, too, unless the selector was never
        scraped before: then counting begins there.
        """
        await self._scrape(models)
        seconds += self._lost_s
        windows = {model: self._window(model, seconds) for model in models}
        is_lost = bool(self._lost())
        self._lost_s = seconds if is_lost else 0.0
        self._live.clear()
        if not is_lost:
            answering = self._answering()
            for one in self._all():
                one.begin()
                if one.instance in answering and (one.error or one in self._away.values()):
                    one.last = None  # what grows meanwhile is counted at another address
            self._counted.clear()
            self._looked_at = self._clock()
            self._since = self._wall(), self._wall()
        return windows

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Scrape, and return the current load."""
        await self._scrape(models)
        now, loads = self._clock(), {}
        seconds = now - self._looked_at
        for model in models:
            live = self._gauge("reservations", model)
            if isinstance(live, Value):
                self._live[model].append(live.value)
            loads[model] = Load(
                prefill_backlog_tokens=self._backlog(model),
                concurrency=live,
                arrived=self._arrived(model),
                seconds=seconds,
            )
        # otherwise the next look covers this time
        if not self._lost():
            self._looked_at = now
            if self._since is not None:
                self._since = self._since[0], self._wall()
            for one in self._all():
                one.is_new_to_looks = False
        return loads

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _scrape(self, models: Sequence[ModelKey]) -> None:
        names = {model.model_name for model in models}
        addresses = self._named if self._addresses is None else await self._addresses.look()
        self._follow(addresses)
        await asyncio.gather(*(self._scrape_one(one, names) for one in addresses))
        self._look_for_unseen()
        self._warn()

    def _follow(self, addresses: Sequence[SelectorAddress]) -> None:
        """Keep the counters of those that are asked now apart from those of others."""
        known = self._away | self._counters
        self._counters = {
            one.url: known.get(one.url) or SelectorCounters(one.shown) for one in addresses
        }
        for one in addresses:
            self._counters[one.url].shown = one.shown
            self._counters[one.url].is_one_of_several = one.is_one_of_several
        away = [(url, one) for url, one in known.items() if url not in self._counters]
        self._away = OrderedDict(away[-_AWAY_MAX:])

    async def _scrape_one(self, address: SelectorAddress, models: set[str]) -> None:
        one = self._counters[address.url]
        try:
            page = await whole_answer(
                self._client,
                "GET",
                f"{address.url}/metrics",
                within_s=TIMEOUT_S,
                failure=SourceError,
                headers=lambda: {
                    **(self._headers() if self._headers else {}),
                    **({"host": address.authority} if address.authority else {}),
                },
                extensions={"sni_hostname": address.name} if address.name else None,
            )
            if page.status != OK:
                raise SourceError(f"answered {page.status}")  # noqa: TRY301 - reported below
            # a foreign page is not a selector with no counts: its counts next time would all seem
            # new
            text = page.body.decode()
            if PREFIX not in text:
                raise SourceError("no metrics of a selector")  # noqa: TRY301 - as above
            since = self._since if self._follows else None
            one.take(parse(text, models), self._clock(), self._wall(), since=since)
        except (SourceError, ValueError) as error:
            one.error = f"{address.shown}: {error}"

    def _all(self) -> Iterator[SelectorCounters]:
        """Return the counters of this window, of those that are gone, too."""
        yield from self._counters.values()
        yield from self._away.values()

    def _distinct(self) -> Iterator[SelectorCounters]:
        """Return the same, once for a selector that answers at several addresses.

        A dual-stack replica has one of each family, and two names may lead to one replica.
        """
        owners = self._answering()
        for one in self._all():
            owner = owners.get(one.instance, one)
            if owner is one or owner.is_new:
                yield one

    def _answering(self) -> dict[str, SelectorCounters]:
        """Return the one that answers, by the id of its process; of several, not a new one."""
        found: dict[str, SelectorCounters] = {}
        for one in sorted(self._counters.values(), key=lambda one: one.is_new):
            if one.instance and not one.error:
                found.setdefault(one.instance, one)
        return found

    def _lost(self) -> list[str]:
        """Return why an unknown part of the traffic is not counted, by selector."""
        errors = [one.error for one in self._counters.values() if one.error]
        problems = {} if self._addresses is None else self._addresses.problems
        if len(errors) == len(self._counters):
            return [*problems.values(), *errors] or ["no selector"]
        now, answering = self._clock(), self._answering()
        return [
            one.error
            for one in self._counters.values()
            if one.error
            and one.instance not in answering  # at another address
            and (
                one.is_several
                or is_waited_for(one.answered_at, now, is_one_of_several=one.is_one_of_several)
            )
        ]

    def _look_for_unseen(self) -> None:
        """Count the replicas that selectors know and that are not scraped, once that lasts."""
        distinct = {id(one) for one in self._distinct()}
        seen = [one for one in self._counters.values() if not one.error and id(one) in distinct]
        replicas = 1 + max((one.replicas for one in seen), default=0)
        now = self._clock()
        if replicas <= len(seen) or not seen:
            self._unseen_since, self.unseen = None, 0
            return
        self._unseen_since = now if self._unseen_since is None else self._unseen_since
        if now - self._unseen_since >= UNSEEN_S:
            self.unseen = replicas - len(seen)

    def _warn(self) -> None:
        """Set the warnings; a new one is logged once."""
        found = [one.error for one in self._counters.values() if one.is_several]
        if self.unseen:
            scraped = ", ".join(one.shown for one in self._counters.values() if not one.error)
            found.append(
                f"{self.unseen} further replicas of {scraped} are not scraped: their requests are "
                "not counted; name every selector, or the headless Service that leads to all"
            )
        if self._addresses is not None:
            found += self._addresses.problems.values()
        for text in found:
            if text not in self.warnings:
                _log.warning("%s", text)
        self.warnings = tuple(found)

    def _arrived(self, model: ModelKey) -> Reading:
        """Return the requests since the last look; unknown while a selector does not answer."""
        lost = self._lost()
        total = self._sum("demand_requests_total", model)
        if lost or total is None:
            return Missing("; ".join(lost) or "no selector counts demand")
        before = self._counted.get(model, 0.0)
        self._counted[model] = total
        new = [one.shown for one in self._distinct() if one.is_new_to_looks]
        if new:
            return Missing(f"counting begins at {', '.join(new)}")
        return counted(total - before, "no selector counts demand")

    def _window(self, model: ModelKey, seconds: float) -> Window:
        lost = self._lost()
        if lost:
            return Window(seconds=seconds, requests=Missing("; ".join(lost)))
        new = [one.shown for one in self._distinct() if one.is_new]
        if new:
            why = f"counting begins at {', '.join(new)}"
            return Window(seconds=seconds, requests=Missing(why))
        requests = counted(self._sum("demand_requests_total", model), "no selector counts demand")
        live = self._live.get(model)
        return Window(
            seconds=seconds,
            requests=requests,
            isl=self._mean("demand_isl_tokens", model, requests),
            osl=self._mean("demand_output_tokens", model, requests),
            ttft_ms=self._mean("demand_ttft_seconds", model, requests, 1e3),
            itl_ms=self._mean("demand_itl_seconds", model, requests, 1e3),
            request_s=self._mean("demand_request_seconds", model, requests),
            effective_isl=self._mean("demand_prefill_tokens", model, requests),
            concurrency=Value(sum(live) / len(live)) if live else Missing("not looked at"),
            isl_mix=from_buckets(self._buckets("demand_isl_tokens_bucket", model)),
            prefill_moments=self._moments("measured_prefill_moments_total", model),
            itl_moments=self._moments("measured_itl_moments_total", model),
            rank_kv_tokens=self._gauge("measured_rank_kv_tokens", model),
            prefill_worker_ranks=self._gauge("measured_prefill_worker_ranks", model),
            decode_worker_ranks=self._gauge("measured_decode_worker_ranks", model),
            arrived=self._arrived(model),
            arrived_s=self._clock() - self._looked_at,
        )

    def _mean(self, name: str, model: ModelKey, requests: Reading, scale: float = 1.0) -> Reading:
        mean = ratio(
            self._sum(f"{name}_sum", model),
            self._sum(f"{name}_count", model),
            f"no selector reports {name}",
            scale,
        )
        if isinstance(mean, Idle) and isinstance(requests, Value):
            return Missing(f"workers do not report {name.removeprefix('demand_')}")
        return mean

    def _moments(self, name: str, model: ModelKey) -> Moments | Missing:
        sums = {moment: self._sum(name, model, moment) for moment in MOMENTS}
        return moments(sums, f"no selector reports {name}")

    def _sum(self, name: str, model: ModelKey, label: str = "") -> float | None:
        key = (name, model.model_name, model.tenant_id, label)
        found = [one.grown[key] for one in self._distinct() if key in one.grown]
        return sum(found) if found else None

    def _buckets(self, name: str, model: ModelKey) -> list[tuple[float, float]]:
        totals: dict[float, float] = defaultdict(float)
        for one in self._distinct():
            for (found, model_name, tenant_id, bound), value in one.grown.items():
                if (found, model_name, tenant_id) == (name, model.model_name, model.tenant_id):
                    totals[float(bound)] += value
        return sorted(totals.items())

    def _backlog(self, model: ModelKey) -> Reading:
        booked = self._gauge("rank_prefill_tokens", model)
        waiting = self._gauge("pending_isl_tokens", model)
        known = [one.value for one in (booked, waiting) if isinstance(one, Value)]
        return Value(sum(known)) if known else booked

    def _gauge(self, name: str, model: ModelKey) -> Reading:
        key = (name, model.model_name, model.tenant_id, "")
        asked = self._counters.values()
        seen = [one.last for one in asked if one.last is not None and not one.error]
        if not seen:
            return Missing("; ".join(self._lost()))
        found = [samples[key] for samples in seen if key in samples]
        return Value(max(found)) if found else Missing(f"no selector reports {name}")
