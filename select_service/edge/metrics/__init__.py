"""GET /metrics: plain counters of the core and the edge, read at scrape time."""
