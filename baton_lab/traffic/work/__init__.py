"""What groups do in the simulator: the rows of a batch, and the turns of a chain."""
