"""Bytes to requests and answers to bytes, in JSON and in MessagePack."""
