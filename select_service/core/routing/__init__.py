"""The whole decision: read, candidates, match, price, pick, book."""
