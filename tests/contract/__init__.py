"""The recorded transcripts of the reference, played against a real server process."""
