"""Where workers and replicas are found without being told: a file, Kubernetes, DNS.

Each source names everything it sees, again and again; `followers.py` makes the catalog and the
replica plane agree with the latest. What changes that takes is decided in `core/discovery`.
"""
