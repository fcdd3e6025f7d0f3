"""The fleet: the catalog, the roles of ranks, and which ranks may take a prompt at all."""
