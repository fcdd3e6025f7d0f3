"""Writes exchanges.json: what Envoy and an endpoint picker say to each other, in Envoy's messages.

Needs the compiled messages of Envoy's API (`pip install --target DIR xds-protos`, and DIR on
PYTHONPATH; not into an environment with OpenTelemetry, whose files it overwrites):

    PYTHONPATH=DIR python tests/golden/epp/record.py

The orders follow the endpoint picker's protocol of the Gateway API Inference Extension and Envoy's
ext_proc: which messages Envoy sends in each mode, which it awaits.
"""

import base64
import json
from pathlib import Path

from envoy.config.core.v3 import base_pb2 as core
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2 as modes
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

Mode = modes.ProcessingMode
FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"
JSON = {"content-type": "application/json"}
SHORT = b'{"model": "m", "prompt": [1, 2, 3, 4, 5, 6, 7, 8]}'
LONG = b'{"model": "m", "prompt": [%s]}' % b", ".join(b"%d" % one for one in range(14_000))
CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "What is a KV cache?"}]}'


def headers(fields, *, end=False):
    mapped = core.HeaderMap()
    for name, value in fields.items():
        mapped.headers.add(key=name, raw_value=value.encode())
    return ext_proc.HttpHeaders(headers=mapped, end_of_stream=end)


def request(path="/v1/completions", method="POST", more=None, *, end=False, **beside):
    fields = {":method": method, ":path": path, ":authority": "gateway", **JSON, **(more or {})}
    return ext_proc.ProcessingRequest(request_headers=headers(fields, end=end), **beside)


def modes_of(request_body, response_body):
    return {
        "protocol_config": ext_proc.ProtocolConfiguration(
            request_body_mode=request_body, response_body_mode=response_body
        )
    }


def body(kind, data, *, end):
    part = ext_proc.HttpBody(body=data, end_of_stream=end)
    return ext_proc.ProcessingRequest(**{kind: part})


def trailers(kind):
    part = ext_proc.HttpTrailers(trailers=core.HeaderMap(headers=[core.HeaderValue(key="t")]))
    return ext_proc.ProcessingRequest(**{kind: part})


def response(served=FIRST, *, end=False):
    made = ext_proc.ProcessingRequest(response_headers=headers({":status": "200"}, end=end))
    if served:
        found = made.metadata_context.filter_metadata["envoy.lb"]
        found["x-gateway-destination-endpoint-served"] = served
    return made


def among(*endpoints):
    metadata = core.Metadata()
    metadata.filter_metadata["envoy.lb.subset_hint"].update(
        {"x-gateway-destination-endpoint-subset": list(endpoints)}
    )
    return {"metadata_context": metadata}


# -- answers -------------------------------------------------------------------------------------


def chosen(kind, endpoint=FIRST, rank=None):
    made = ext_proc.ProcessingResponse()
    common = getattr(made, kind).response
    common.clear_route_cache = True
    fields = {"x-gateway-destination-endpoint": endpoint}
    if rank is not None:
        fields["X-data-parallel-rank"] = rank
    for name, value in fields.items():
        option = common.header_mutation.set_headers.add()
        option.header.key, option.header.raw_value = name, value.encode()
        option.append_action = core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    made.dynamic_metadata.update({"envoy.lb": {"x-gateway-destination-endpoint": endpoint}})
    return made


def piece(kind, data, *, end):
    made = ext_proc.ProcessingResponse()
    streamed = getattr(made, kind).response.body_mutation.streamed_response
    streamed.SetInParent()
    streamed.body, streamed.end_of_stream = data, end
    return made


def passed(kind):
    made = ext_proc.ProcessingResponse()
    getattr(made, kind).SetInParent()
    return made


DUPLEX = modes_of(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
ANSWERED = [
    (response(), [passed("response_headers")]),
    (body("response_body", b"data: 1\n\n", end=False), [piece("response_body", b"data: 1\n\n", end=False)]),
    (body("response_body", b"", end=True), [piece("response_body", b"", end=True)]),
]
"""The response of a full-duplex stream."""

EXCHANGES = {
    "full duplex": [
        (request(**DUPLEX), []),
        (body("request_body", SHORT[:20], end=False), []),
        (
            body("request_body", SHORT[20:], end=True),
            [chosen("request_headers"), piece("request_body", SHORT, end=True)],
        ),
        *ANSWERED,
    ],
    "full duplex, the end in a message of its own": [
        (request(**DUPLEX), []),
        (body("request_body", SHORT, end=False), []),
        (
            body("request_body", b"", end=True),
            [chosen("request_headers"), piece("request_body", SHORT, end=True)],
        ),
        *ANSWERED,
    ],
    "full duplex with trailers": [
        (request(**DUPLEX), []),
        (body("request_body", SHORT, end=False), []),
        (
            trailers("request_trailers"),
            [
                chosen("request_headers"),
                piece("request_body", SHORT, end=False),
                passed("request_trailers"),
            ],
        ),
        (response(), [passed("response_headers")]),
        (body("response_body", b"{}", end=False), [piece("response_body", b"{}", end=False)]),
        (trailers("response_trailers"), [passed("response_trailers")]),
    ],
    "full duplex, trailers and no body": [
        (request(**DUPLEX), []),
        (trailers("request_trailers"), [chosen("request_headers"), passed("request_trailers")]),
        (response(end=True), [passed("response_headers")]),
    ],
    "full duplex, in pieces": [
        (request(**DUPLEX), []),
        *[
            (body("request_body", LONG[at : at + 65_536], end=False), [])
            for at in range(0, len(LONG) - 65_536, 65_536)
        ],
        (
            body("request_body", LONG[(len(LONG) - 1) // 65_536 * 65_536 :], end=True),
            [
                chosen("request_headers"),
                *[
                    piece("request_body", LONG[at : at + 62_000], end=at + 62_000 >= len(LONG))
                    for at in range(0, len(LONG), 62_000)
                ],
            ],
        ),
        *ANSWERED,
    ],
    "modes not told": [
        (request(), []),
        (
            body("request_body", CHAT, end=True),
            [chosen("request_headers"), piece("request_body", CHAT, end=True)],
        ),
        *ANSWERED,
    ],
    "no body": [
        (request("/v1/models", "GET", end=True, **DUPLEX), [chosen("request_headers")]),
        *ANSWERED,
    ],
    "buffered": [
        (request(**modes_of(Mode.BUFFERED, Mode.BUFFERED)), [passed("request_headers")]),
        (body("request_body", SHORT, end=True), [chosen("request_body")]),
        (response(), [passed("response_headers")]),
        (body("response_body", b"{}", end=True), [passed("response_body")]),
    ],
    "buffered with trailers": [
        (request(**modes_of(Mode.BUFFERED, Mode.STREAMED)), [passed("request_headers")]),
        (body("request_body", SHORT, end=False), [chosen("request_body")]),
        (trailers("request_trailers"), [passed("request_trailers")]),
        (response(), [passed("response_headers")]),
        (body("response_body", b"data: 1\n\n", end=False), [passed("response_body")]),
        (body("response_body", b"data: 2\n\n", end=True), [passed("response_body")]),
    ],
    "buffered in part": [
        (request(**modes_of(Mode.BUFFERED_PARTIAL, Mode.STREAMED)), [passed("request_headers")]),
        (body("request_body", SHORT, end=True), [chosen("request_body")]),
        (response(), [passed("response_headers")]),
        (body("response_body", b"{}", end=True), [passed("response_body")]),
    ],
    "streamed": [
        (
            request(more={"content-length": str(len(SHORT))}, **modes_of(Mode.STREAMED, Mode.STREAMED)),
            [chosen("request_headers")],
        ),
        (body("request_body", SHORT, end=True), [passed("request_body")]),
        (response(), [passed("response_headers")]),
        (body("response_body", b"{}", end=True), [passed("response_body")]),
    ],
    "headers alone": [
        (request(**modes_of(Mode.NONE, Mode.NONE)), [chosen("request_headers")]),
        (response(), [passed("response_headers")]),
    ],
    "a subset": [
        (request(**DUPLEX, **among("10.0.0.9:8000", SECOND)), []),
        (
            body("request_body", SHORT, end=True),
            [chosen("request_headers", SECOND), piece("request_body", SHORT, end=True)],
        ),
        (response(SECOND), [passed("response_headers")]),
        (body("response_body", b"{}", end=True), [piece("response_body", b"{}", end=True)]),
    ],
    "several ranks": [
        (request(**DUPLEX), []),
        (
            body("request_body", SHORT, end=True),
            [chosen("request_headers", rank="3"), piece("request_body", SHORT, end=True)],
        ),
        *ANSWERED,
    ],
    "only looking on": [
        (request(observability_mode=True, **DUPLEX), []),
        (
            ext_proc.ProcessingRequest(
                request_body=ext_proc.HttpBody(body=SHORT, end_of_stream=True),
                observability_mode=True,
            ),
            [],
        ),
    ],
}
REFUSED = {
    "none of the subset": (503, [request(**DUPLEX, **among("10.0.0.9:8000")), body("request_body", SHORT, end=True)]),
    "an empty subset": (503, [request(**DUPLEX, **among()), body("request_body", SHORT, end=True)]),
    "no JSON": (400, [request(**DUPLEX), body("request_body", SHORT[:-1], end=True)]),
    "no object": (400, [request(**DUPLEX), body("request_body", b"[1]", end=True)]),
    "no JSON, buffered": (
        400,
        [request(**modes_of(Mode.BUFFERED, Mode.BUFFERED)), body("request_body", b"{", end=True)],
    ),
    "no worker has the model": (
        503,
        [request(**DUPLEX), body("request_body", b'{"model": "x", "prompt": [1]}', end=True)],
    ),
}


def told(message):
    return base64.b64encode(message.SerializeToString(deterministic=True)).decode()


def main():
    found = {
        "exchanges": {
            name: [[told(sent), [told(one) for one in gets]] for sent, gets in steps]
            for name, steps in EXCHANGES.items()
        },
        "refused": {
            name: [status, [told(one) for one in sends]]
            for name, (status, sends) in REFUSED.items()
        },
    }
    text = json.dumps(found, indent=1)
    Path(__file__).with_name("exchanges.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
