"""Tests of what tenants may hold."""
