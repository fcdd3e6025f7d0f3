"""From the body of an OpenAI request to the answer of a reserved worker.

`reserve_openai` does the first half for gateways that forward by themselves, `forward` all of it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, Self, Unpack

import httpx
import msgspec
from msgspec import Raw, Struct

from indexer.http_client import http_client
from select_service.client import ClientError, ServiceError
from select_service.client.reservation import Reservation
from select_service.client.reserve_context import AsyncReserve
from select_service.errors import BodyTooLarge
from select_service.gateway.engine_exchange import EngineExchange, EngineFailed
from select_service.gateway.fleet_catalog import FleetCatalog
from select_service.gateway.local_tokenizer import Encode, LocalTokenizer
from select_service.gateway.options import GatewayOptions, GatewayTraffic
from select_service.gateway.response import GatewayResponse, json_response, refusal
from select_service.tokenization.engine_tokenizer import (
    AnyUrl,
    EngineTokenizer,
    engine_url,
    prompt_fields,
)
from select_service.tokenization.openai_body import (
    FAIRNESS_HEADER,
    OBJECTIVE_HEADER,
    PromptBody,
    read_body,
)
from select_service.types.selections import RANK_HEADER

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from select_service.client import AsyncClient
    from select_service.client.calls import SelectOptions
    from select_service.gateway.fleet_catalog import ModelTarget

_CHAT: Final = "/v1/chat/completions"
_UNREADY: Final = frozenset((500, 502, 503))
"""Statuses of an engine that another worker may do better than."""

_NOT_PASSED_ON: Final = frozenset(
    (
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        RANK_HEADER.lower(),  # a reserved rank is named
    )
)


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Wishes(Struct):
    """What a body says besides its prompt."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


_WISHES: Final = msgspec.json.Decoder(_Wishes)
_MEMBERS: Final = msgspec.json.Decoder(dict[str, Raw])


class Gateway:
    """Forwards OpenAI requests to reserved workers; used on one event loop.

    Attributes:
        traffic: What was counted; `stats` returns it by name.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        tokenizer: Encode | None = None,
        tenant_id: str = "default",
        options: GatewayOptions | None = None,
        tls: ssl.SSLContext | bool = True,
    ) -> None:
        """Make no connection yet.

        Args:
            client: the SDK's. With `Options(retry_refused=False)` a request that the service
                refuses for load is refused at once, and its client is shown when to come again;
                otherwise it waits here.
            tokenizer: tokenizes here, for example a `HuggingFaceTokenizer`; default: engines are
                asked for the tokens, at /tokenize, as vLLM has it.
            tenant_id: whose workers are used.
            options: limits and waits.
            tls: which engines to trust behind https.
        """
        self._client = client
        self._tenant_id = tenant_id
        self.options = options = options or GatewayOptions()
        self.traffic = GatewayTraffic()
        silence_s = options.engine_silence_s
        timeout = httpx.Timeout(silence_s, connect=options.connect_timeout_s, pool=None)
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=options.idle_connections_max
        )
        self._http = http_client(timeout, tls=tls, limits=limits)
        self._catalog = FleetCatalog(
            client, self._http, tenant_id, options, self.traffic, time.monotonic
        )
        self._tokenizer: EngineTokenizer | LocalTokenizer
        if tokenizer is None:
            self._tokenizer = EngineTokenizer(AnyUrl(), options, self.traffic, time.monotonic)
        else:
            self._tokenizer = LocalTokenizer(tokenizer, options, self.traffic)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections to engines. The client is its owner's to close. Idempotent."""
        await self._tokenizer.close()
        await self._http.aclose()

    def stats(self) -> dict[str, float | dict[str, int]]:
        """Return counters since the gateway was created; some by reason or source."""
        return self.traffic.as_dict()

    # -- for programs that forward -----------------------------------------------------------------

    def reserve_openai(
        self,
        body: bytes | Mapping[str, Any],
        *,
        path: str = _CHAT,
        timeout_ms: float | None = None,
        **wishes: Unpack[SelectOptions],
    ) -> AsyncReserve[Reservation]:
        """Reserve a worker for a request: `async with gateway.reserve_openai(body) as r:`.

        The chat template is applied and the prompt tokenized; a prompt of which that is impossible
        (images, several prompts) is placed by load alone.

        Args:
            body: of the request, as bytes or as an object.
            path: of the request; `/v1/completions` for prompts without a chat.
            timeout_ms: total time of the reservation.
            wishes: fields of POST /select_and_reserve, before those that the body names.

        Raises:
            InvalidJson, InvalidRequest: the body is no JSON object, or its model is no text.
            ServiceError, ClientError: as `AsyncClient.reserve`, from which the result comes.
        """
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)

        async def begin() -> Reservation:
            prompt = read_body(raw, path, "")
            target = await self._catalog.target(prompt.model)
            fields = await self._prompt(prompt, target) | wishes_of(raw)
            fields.update(wishes)
            return await self._client.reserve(timeout_ms=timeout_ms, **fields)

        return AsyncReserve(begin)

    async def models(self) -> GatewayResponse:
        """Return the answer of GET /v1/models: what the engines list, each model once."""
        return json_response(200, {"object": "list", "data": await self._catalog.models()})

    # -- the whole way ---------------------------------------------------------------------------

    async def forward(
        self, body: bytes, *, path: str, headers: Mapping[str, str] | None = None
    ) -> GatewayResponse:
        """Reserve a worker, send the request there, and return what it answers once that begins.

        Refusals of the service and failures of engines are answers in OpenAI's form, 429 and 503
        with Retry-After. Cancelling it frees the reservation.

        Args:
            body: of the request, which is passed on as it is but for `stream_options`
                (`GatewayOptions.ask_usage`).
            path: of the request, with its query.
            headers: of the request, by lower-case name; those between client and gateway stay here.
        """
        self.traffic.requests += 1
        try:
            if len(body) > self.options.body_bytes_max:
                self.traffic.hit_limit("body_bytes_max")
                raise BodyTooLarge(f"the body is longer than {self.options.body_bytes_max} bytes")
            return await self._forward(body, path, headers or {})
        except (ServiceError, ClientError, EngineFailed) as error:
            self.traffic.refused += 1
            return refusal(error)

    async def _forward(self, body: bytes, path: str, headers: Mapping[str, str]) -> GatewayResponse:
        prompt = read_body(body, path, headers.get("content-type", ""))
        target = await self._catalog.target(prompt.model)
        fields = await self._prompt(prompt, target) | wishes_of(body)
        fields |= {
            name: headers[header]
            for name, header in (("slo_class", OBJECTIVE_HEADER), ("fairness_id", FAIRNESS_HEADER))
            if headers.get(header)
        }
        sent, drops_usage = self._with_usage(body)
        passed = {k: v for k, v in headers.items() if k.lower() not in _NOT_PASSED_ON}
        failed: set[int] = set()
        while True:
            reservation = await self._client.reserve(**fields)
            try:
                request = self._request(reservation, path, sent, passed)
                exchange = await EngineExchange.begun(
                    self._http,
                    request,
                    reservation,
                    self.traffic,
                    self.options,
                    drops_usage=drops_usage,
                    has_tokens="token_ids" in fields,
                )
            except EngineFailed as error:
                reservation.free("failed")
                self.traffic.engine_failures += 1
                if not error.may_retry or not self._may_retry(target, reservation, failed, fields):
                    raise
                continue
            except BaseException:
                reservation.free("cancelled")
                raise
            if exchange.status in _UNREADY:
                self.traffic.engine_failures += 1
                if self._may_retry(target, reservation, failed, fields):
                    await exchange.abandon()
                    continue
            return GatewayResponse(exchange.status, exchange.headers(), exchange=exchange)

    def _may_retry(
        self,
        target: ModelTarget,
        reservation: Reservation,
        failed: set[int],
        fields: dict[str, Any],
    ) -> bool:
        """Tell whether another worker is left, and ask for one of those from now on."""
        failed.add(reservation.worker_id)
        others = self._catalog.others(target, failed)
        if len(failed) >= self.options.engines_max or not others:
            return False
        fields["allowed_worker_ids"] = others
        self.traffic.retries += 1
        return True

    async def _prompt(self, prompt: PromptBody, target: ModelTarget) -> dict[str, Any]:
        """Return the fields that stand for the prompt: its tokens, or its length alone."""
        stands_for_it = await prompt_fields(
            prompt,
            self._tokenizer.tokens,
            f"{target.model_name}\0{self._tenant_id}\0{target.lora_name or ''}",
            lambda: self._catalog.engines(target),
            self._catalog.block_size(target),
            self.traffic,
        )
        return {
            "model_name": target.model_name,
            "tenant_id": self._tenant_id,
            "lora_name": target.lora_name,
            "cache_salt": prompt.cache_salt,
            **stands_for_it,
        }

    def _request(
        self, reservation: Reservation, path: str, body: bytes, headers: Mapping[str, str]
    ) -> httpx.Request:
        """Build the request to the reserved worker.

        Raises:
            EngineFailed: its endpoint is no URL.
        """
        endpoint, url = reservation.endpoint, None
        with contextlib.suppress(httpx.InvalidURL):
            url = httpx.URL(f"{engine_url(endpoint or '')}/{path.lstrip('/')}")
        if url is None or not url.host or url.scheme not in ("http", "https"):
            why = f"the endpoint {endpoint} of worker {reservation.worker_id} is no URL of HTTP"
            raise EngineFailed(why, status=503, code="endpoint_unusable")
        sent = {
            **headers,
            "content-type": headers.get("content-type", "application/json"),
            "accept-encoding": "identity",
            **reservation.headers,
        }
        return self._http.build_request("POST", url, content=body, headers=sent)

    def _with_usage(self, body: bytes) -> tuple[bytes, bool]:
        """Return the body for the engine, and whether the usage is to be kept from the client."""
        if not self.options.ask_usage:
            return body, False
        try:
            wishes = _WISHES.decode(body)
            asked = wishes.stream_options is not None and wishes.stream_options.include_usage
            if not wishes.stream or asked:
                return body, False
            members = _MEMBERS.decode(body)
            options = msgspec.json.decode(members.get("stream_options", Raw(b"null")))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return body, False  # the engine judges it
        members["stream_options"] = Raw(
            msgspec.json.encode({**(options or {}), "include_usage": True})
        )
        return msgspec.json.encode(members), True


def wishes_of(body: bytes) -> dict[str, Any]:
    """Return what a body says about the length of its output."""
    try:
        wishes = _WISHES.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}  # the engine judges it
    most = wishes.max_completion_tokens or wishes.max_tokens
    return {} if most is None or not 0 < most < 1 << 32 else {"expected_output_tokens": most}
