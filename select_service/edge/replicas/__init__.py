"""The replica plane on the wire, and snapshots fetched from others."""
