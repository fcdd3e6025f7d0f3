"""The few calls of the demo: route by route with the SDK's `call`, as a frontend may make them.

It shows the bare API, and works with every service that implements it. Each booking has the same
reservation_id and selection_id, so that both generations of the interface accept it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from select_service.client import (
    AsyncClient,
    ClientError,
    NotAnAnswer,
    Options,
    ServiceError,
    Unreachable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = "demo"  # what the demo's workers serve
_TIMEOUT_S = 30.0  # a selection may wait in the service's queue


_WANTS_TOKEN = (401, 403)


class SelectorRefused(Exception):
    """The service gave no answer, or one that the demo cannot continue with."""


@dataclass(frozen=True, slots=True)
class BookedAnswer:
    """The parts of an answer of /select_and_reserve that the demo needs."""

    worker_id: int
    dp_rank: int
    predicted_tokens: int  # reusable on that rank, as the service predicts


class SelectorClient:
    """The connections to one service."""

    def __init__(self, url: str, *, model_name: str, token: str | None = None) -> None:
        self.model_name = model_name
        once = Options.single_attempt(_TIMEOUT_S, msgpack=False)
        self._sdk = AsyncClient(url, token=token, options=once)

    async def close(self) -> None:
        """Close the connections."""
        await self._sdk.aclose()

    async def healthy(self) -> bool:
        """Whether the service answers at all."""
        try:
            await self._sdk.call("GET", "/health")
        except NotAnAnswer:  # the body does not matter
            return True
        except (ServiceError, ClientError):
            return False
        return True

    async def register(self, worker: dict[str, Any]) -> str:
        """POST /workers; returns its lifecycle."""
        record = await self._call("POST", "/workers", worker | {"model_name": self.model_name})
        return str(record["lifecycle"])

    async def deregister(self, worker_id: int) -> None:
        """DELETE /workers/{id}."""
        await self._call("DELETE", f"/workers/{worker_id}")

    async def select_and_reserve(
        self,
        reservation_id: str,
        token_ids: Sequence[int],
        *,
        expected_output_tokens: int,
        allowed_worker_ids: Sequence[int] | None = None,
    ) -> BookedAnswer:
        """Choose a worker for a prompt and book it."""
        body: dict[str, Any] = {
            "model_name": self.model_name,
            "reservation_id": reservation_id,
            "selection_id": reservation_id,
            "token_ids": token_ids,
            "expected_output_tokens": expected_output_tokens,
        }
        if allowed_worker_ids is not None:
            body["allowed_worker_ids"] = allowed_worker_ids
        answer = await self._call("POST", "/select_and_reserve", body)
        rank = answer["dp_rank"]
        # every worker of the demo keeps its cache on the device
        predicted = answer["overlap"]["dp"].get(str(rank), 0)
        return BookedAnswer(answer["worker_id"], rank, predicted)

    async def prefill_complete(self, reservation_id: str, cached_tokens: int) -> None:
        """Report the prompt as computed, with so many tokens cached."""
        path = f"/reservations/{quote(reservation_id)}/prefill_complete"
        await self._call("POST", path, {"cached_tokens": cached_tokens})

    async def output_block(self, reservation_id: str) -> None:
        """Report one more block of output."""
        await self._call("POST", f"/reservations/{quote(reservation_id)}/output_block", {})

    async def free(self, reservation_id: str) -> None:
        """Free a finished request's reservation."""
        await self._call("DELETE", f"/reservations/{quote(reservation_id)}")

    async def workers(self) -> list[dict[str, Any]]:
        """The records of this model's workers, from GET /workers."""
        records: list[dict[str, Any]] = await self._call(
            "GET", f"/workers?model_name={quote(self.model_name)}"
        )
        return records

    async def draining(self) -> set[int]:
        """Return the workers of this model that are draining."""
        records = await self.workers()
        return {one["worker_id"] for one in records if one["lifecycle"] == "draining"}

    async def loads(self) -> list[dict[str, Any]]:
        """The rows of this model in GET /loads."""
        scopes = await self._call("GET", f"/loads?model_name={quote(self.model_name)}")
        return [row for scope in scopes for row in scope["loads"]]

    async def device_blocks(self, token_ids: Sequence[int]) -> dict[int, int]:
        """Worker → leading blocks of a prompt on its device, as the service sees it."""
        body = {"model_name": self.model_name, "token_ids": list(token_ids)}
        answer = await self._call("POST", "/overlap_scores", body)
        return {row["worker_id"]: row["device_blocks"] for row in answer["workers"]}

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return await self._sdk.call(method, path, body)
        except ServiceError as error:
            reason = f"{method} {path}: {error.status} {error}"
            if error.status in _WANTS_TOKEN:
                reason += " (--token-file FILE: a token of the scope admin)"
            raise SelectorRefused(reason) from error
        except Unreachable as error:
            raise SelectorRefused(f"{method} {path}: {error}\n{error.remedy}") from error
        except ClientError as error:
            raise SelectorRefused(f"{method} {path}: {error}") from error
