"""Finds workers and replicas without registration: from a file, Kubernetes or DNS.

Each source repeatedly publishes everything it sees; `followers.py` makes the catalog and the
replica plane match the latest. `core/discovery` decides which changes that takes.
"""
