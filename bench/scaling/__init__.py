"""How throughput and CPU change with the processors a server may use."""
