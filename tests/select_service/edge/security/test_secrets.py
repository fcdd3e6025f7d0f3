"""What has a secret in its address is shown without it, wherever it is shown."""

from __future__ import annotations

from tests.live.ports import free_port
from tests.select_service.edge.serving import PROMPT, app_client, worker
from tests.wait import until

SECRET = "hunter2-s3cret"
URL = f"http://me:{SECRET}@127.0.0.1:9"
SHOWN = "http://***@127.0.0.1:9"
PAGES = ("/config", "/metrics", "/ready?verbose=true", "/decisions", "/shadow", "/openapi.json")


async def test_no_page_of_a_service_has_it() -> None:
    """Flags refuse such addresses; who embeds a service may set them."""
    chosen = {
        "indexer_peers": (URL,),
        "kubernetes_api": URL,
        "kubernetes_workers": "a=b",
        "replica_sync_port": free_port(),
        "advertise_url": URL,
    }
    async with app_client(**chosen) as (client, service):
        await client.post("/workers", json=worker())
        await client.post("/select", json=PROMPT)
        recovery = service.recovery
        assert recovery is not None
        await until(lambda: bool(recovery.failures))
        pages = {path: (await client.get(path)).text for path in PAGES}
        assert pages["/config"].count(SHOWN) == 3
        assert [path for path, text in pages.items() if SECRET in text] == []
