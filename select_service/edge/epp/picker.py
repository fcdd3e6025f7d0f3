"""From a prompt to a worker's endpoint: the driver chooses and books, as for `/select_and_reserve`.

Nothing is decided here. A request is put into the words of the API, the answer into those of the
endpoint picker's protocol. A prompt without tokens is booked under hashes that no rank has, so that
its length counts and nothing matches.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit
from uuid import uuid4

from msgspec import UNSET, Struct

from indexer.types import Scope
from select_service.edge.withdrawal import withdrawn_if_lost
from select_service.errors import NoEligibleWorker, ReservationNotFound, ServiceError
from select_service.tokenization.engine_tokenizer import EngineTokenizer, engine_url, prompt_fields
from select_service.tokenization.openai_body import model_to_serve
from select_service.types import ReservationRequest, SelectAndReserveRequest, Selection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from select_service.core.fleet.catalog import Worker
    from select_service.edge.driver.driver import Driver
    from select_service.edge.epp.picker_traffic import PickerTraffic
    from select_service.tokenization.openai_body import PromptBody
    from select_service.types import Outcome
    from select_service.types.router_config import PickerLimits

_PORTS: Final = {"http": 80, "https": 443}


class EndpointUnusable(NoEligibleWorker):
    """The chosen worker's endpoint is no IP address with a port, which gateways connect to."""

    code = "endpoint_unusable"

    def __init__(self, endpoint: str | None) -> None:
        ServiceError.__init__(
            self, f"the endpoint {endpoint} of the chosen worker is no IP address with a port"
        )


class Wishes(Struct, frozen=True, kw_only=True):
    """What a gateway says about a request besides its body."""

    tenant_id: str = "default"
    slo_class: str | None = None
    fairness_id: str | None = None
    among: frozenset[str] | None = None
    """Endpoints, `ip:port`, to choose from; None: all."""


class Choice(Struct, kw_only=True):
    """A worker that was chosen and booked."""

    reservation_id: str
    worker_id: int
    endpoint: str
    dp_rank: int | None
    """Of workers with several ranks; None: there is only one."""
    request: SelectAndReserveRequest | None
    """What was asked for; None once its response has begun, when it cannot move any more."""


class Picker:
    """Chooses and books for the streams of one server."""

    def __init__(self, driver: Driver, limits: PickerLimits, traffic: PickerTraffic) -> None:
        self._driver, self._traffic = driver, traffic
        self._tokenizer = EngineTokenizer(driver.addresses, limits, traffic, driver.now)

    async def close(self) -> None:
        """Close the connections to engines. Idempotent."""
        await self._tokenizer.close()

    @property
    def is_ready(self) -> bool:
        """Whether requests can be placed."""
        return self._driver.is_ready()

    async def choose(self, body: PromptBody, wishes: Wishes) -> Choice:
        """Choose a worker and book it; cancelling books nothing.

        Raises:
            ServiceError: no worker may take it, or not now.
        """
        driver = self._driver
        if driver.keeper is not None:
            driver.keeper.check_writable()
        scope = self._scope(body.model, wishes.tenant_id)
        workers = self._workers(scope)
        allowed: list[int] | None = None
        if wishes.among is not None:
            among = wishes.among
            workers = {
                name: one for name, one in workers.items() if address_of(one.spec.endpoint) in among
            }
            if not workers:
                raise NoEligibleWorker
            allowed = list(workers)
        prompt = await prompt_fields(
            body,
            self._tokenizer.tokens,
            f"{scope.model_name}\0{scope.tenant_id}",
            lambda: [
                engine_url(one.spec.endpoint) for one in workers.values() if one.spec.endpoint
            ],
            next((one.spec.block_size or 1 for one in workers.values()), 1),
            self._traffic,
        )
        request = SelectAndReserveRequest(
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            cache_salt=body.cache_salt,
            slo_class=wishes.slo_class,
            fairness_id=wishes.fairness_id,
            allowed_worker_ids=allowed,
            on_cache_threshold="fallback",
            **prompt,
        )
        selection = await driver.select_and_reserve(request)
        with withdrawn_if_lost(driver, selection):
            choice = self._choice(selection, request)
            await driver.settle()
        return choice

    def _choice(self, selection: object, request: SelectAndReserveRequest) -> Choice:
        assert isinstance(selection, Selection), "a threshold falls back to a selection"
        assert selection.reservation_id is not UNSET
        endpoint = address_of(selection.endpoint)
        if endpoint is None:
            raise EndpointUnusable(selection.endpoint)
        worker = self._driver.core.catalog.find(selection.worker_id)
        has_ranks = worker is not None and len(worker.ranks) > 1
        return Choice(
            reservation_id=selection.reservation_id,
            worker_id=selection.worker_id,
            endpoint=endpoint,
            dp_rank=selection.dp_rank if has_ranks else None,
            request=request,
        )

    def _scope(self, model: str | None, tenant_id: str) -> Scope:
        """Return where to look for a worker; without a model, the tenant's first with workers."""
        partitions = self._driver.core.partitions

        def is_served(model: str) -> bool:
            return bool(self._workers(Scope(model, tenant_id)))

        def served() -> Iterable[str]:
            mine = (one.model_name for one in partitions if one.tenant_id == tenant_id)
            return filter(is_served, mine)

        return Scope(model_to_serve(model, is_served, served), tenant_id)

    def _workers(self, scope: Scope) -> Mapping[int, Worker]:
        partition = self._driver.core.partitions.get(scope)
        return {} if partition is None else partition.fleet_slots.workers

    # -- after the choice --------------------------------------------------------------------------

    def served(self, choice: Choice, endpoint: str) -> None:
        """The gateway says which worker serves the request: the reservation moves there."""
        if endpoint == choice.endpoint:
            self._traffic.served["chosen"] += 1
            return
        request = choice.request
        workers = {} if request is None else self._workers(request.scope)
        found = [name for name, one in workers.items() if address_of(one.spec.endpoint) == endpoint]
        if request is None or not found:
            self._traffic.served["unknown"] += 1
            return
        self._traffic.served["moved"] += 1
        self.free(choice, "cancelled")
        moved = ReservationRequest(
            reservation_id=uuid4().hex,
            worker_id=found[0],
            model_name=request.model_name,
            tenant_id=request.tenant_id,
            token_ids=request.token_ids,
            sequence_hashes=request.sequence_hashes,
            isl_tokens=request.isl_tokens,
            cache_salt=request.cache_salt,
        )
        try:
            self._driver.reserve(moved)
        except ServiceError:  # it is served all the same
            self._traffic.lost += 1
            return
        choice.reservation_id, choice.worker_id = moved.reservation_id, found[0]
        choice.endpoint = endpoint

    def prefill_complete(self, choice: Choice) -> bool:
        """The response has begun, or goes on: the reservation lives, without its prefill.

        Returns:
            False: it had ended; it expired, or another caller has ended it.
        """
        try:
            self._driver.prefill_complete(choice.reservation_id)
        except ReservationNotFound:
            self._traffic.lost += 1
            return False
        return True

    def free(self, choice: Choice, outcome: Outcome | None) -> None:
        """The request is over, in this way."""
        self._driver.take_back(choice.reservation_id, outcome)


def address_of(endpoint: str | None) -> str | None:
    """Return `ip:port` of a worker's endpoint, an URL or bare; None: it names no IP address."""
    if not endpoint:
        return None
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme)
        address = ip_address(host)
    except ValueError:
        return None
    if port is None:
        return None
    return f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}"
