"""What a prompt would cost on each rank, and which one is cheapest."""
