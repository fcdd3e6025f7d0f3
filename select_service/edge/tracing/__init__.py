"""Tracing: sampling requests, timing their steps, exporting spans to a collector."""
