"""The network side of the replica plane, and fetching other replicas' snapshots."""
