"""A fleet to watch: simulated engines, chat traffic and a live table, over HTTP and ZMQ only."""
