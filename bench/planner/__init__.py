"""What planning is worth, in simulation: the closed loop, and who may go."""
