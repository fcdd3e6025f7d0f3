"""The handlers, by what they are about; each takes an `Api` and a `Request` (see `api.py`)."""
