"""Who there is: the catalog, the roles of ranks, and who may take a prompt at all."""
