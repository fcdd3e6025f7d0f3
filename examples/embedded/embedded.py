"""The service without HTTP, in this very process: deploy/docs/embedding.md has more."""

import asyncio

from select_service import (
    ReservationNotFound,
    SelectAndReserveRequest,
    SelectionService,
    WorkerSpec,
)


async def main() -> None:
    async with SelectionService() as service:  # KV-event listeners included
        await service.upsert_worker(
            WorkerSpec(
                worker_id=7,
                endpoint="ray://replica-7",
                block_size=16,
                kv_events_endpoint="tcp://127.0.0.1:5557",
            )
        )
        chosen = await service.select_and_reserve(
            SelectAndReserveRequest(reservation_id="req-1", token_ids=list(range(64)))
        )
        print(chosen.endpoint, "computes", chosen.effective_prefill_tokens, "tokens")
        await service.prefill_complete("req-1")
        await service.free("req-1")
        try:
            await service.output_block("req-1")
        except ReservationNotFound as refusal:
            print("it has ended, so this is refused:", refusal.status, refusal)


asyncio.run(main())
