"""What planning is worth, in simulation: the closed loop, and which workers may go."""
