"""The real core under a fake clock: arrivals in, decisions and reports out."""
