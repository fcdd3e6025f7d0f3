"""Envoy's external processing: the service as the endpoint picker of an InferencePool.

`server.py` listens; each HTTP request of a gateway is one stream (`processing_stream.py`), whose
body is read and tokenized (both: `select_service/tokenization`) before the driver is asked for a
worker (`picker.py`). `messages.py` has the messages of the protocol. deploy/docs/gateways.md says
what a gateway sends and gets.
"""
