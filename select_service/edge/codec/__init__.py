"""Decodes requests and encodes answers, in JSON and in MessagePack."""
