"""GET /metrics: plain counters of the core and the edges, read at scrape time."""
