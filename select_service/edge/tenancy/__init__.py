"""Restricts the service to what tokens bound to tenants may see."""
