"""Selectors and engines on Ray Serve, with the request router between: see deploy/docs/ray.md.

pip install '.[ray]'  # in a checkout
python examples/ray/engines.py
"""

import sys

try:
    from ray import serve
    from ray.serve.config import RequestRouterConfig
except ModuleNotFoundError as error:
    print(f"this needs Ray Serve ({error}): pip install '.[ray]' in a checkout", file=sys.stderr)
    sys.exit(2)

from select_service.client.ray.serve_worker import ServeWorker
from select_service.serve_ray import app


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.5},
    request_router_config=RequestRouterConfig(
        request_router_class="select_service.client.ray.request_router:SelectServiceRouter",
        request_router_kwargs={"timeout_ms": 250.0},
    ),
)
class Engine:
    async def __init__(self):
        port = 5557 + serve.get_replica_context().rank.rank  # of this engine's KV events
        self.worker = ServeWorker(block_size=16, kv_events_endpoint=f"tcp://127.0.0.1:{port}")
        await self.worker.start()

    async def generate(self, token_ids, max_tokens):
        for number in range(max_tokens):  # here your engine computes
            if number == 0:
                self.worker.prefill_complete()
            yield number

    async def __del__(self):
        await self.worker.aclose()


serve.run(app({"replicas": 2, "num_cpus": 0.1}), name="selectors", route_prefix="/selectors")
engine = serve.run(Engine.bind(), name="engines", route_prefix=None)
answer = engine.options(stream=True).generate.remote(token_ids=list(range(64)), max_tokens=3)
assert list(answer) == [0, 1, 2]
