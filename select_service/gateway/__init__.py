"""The library for gateways: an OpenAI body in, a reserved worker and its answer out.

`Gateway` reads a body, has its prompt tokenized (by an engine, or by `HuggingFaceTokenizer`),
reserves a worker with the SDK, forwards the request, and reports prefill, output and end. It runs
in the gateway's process: the service itself forwards nothing. deploy/docs/gateways.md shows how it
treats each kind of request; `examples/gateway` is a server made of it.
"""

from __future__ import annotations

from select_service.gateway.gateway import Gateway
from select_service.gateway.hugging_face import HuggingFaceTokenizer
from select_service.gateway.local_tokenizer import Encode
from select_service.gateway.options import GatewayOptions
from select_service.gateway.response import GatewayResponse

__all__ = [
    "Encode",
    "Gateway",
    "GatewayOptions",
    "GatewayResponse",
    "HuggingFaceTokenizer",
]
