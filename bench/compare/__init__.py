"""This service and the reference service side by side, in one interleaved run."""
