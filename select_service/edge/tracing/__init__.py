"""Traced requests: who is, when their steps began, and how spans get to a collector."""
