"""Which worker holds which KV-cache block; usable alone."""
