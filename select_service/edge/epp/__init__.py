"""Envoy's external processing: the service as the endpoint picker of an InferencePool.

`server.py` listens; each HTTP request of a gateway is one `exchange.py`, which reads the body, has
it tokenized (both: `select_service/tokenization`) and asks the driver for a worker (`picker.py`).
`messages.py` has the messages of the protocol. deploy/docs/gateways.md says what a
gateway sends and gets.
"""
