"""Work of groups in the simulator: the rows of a batch, and the turns of a chain."""
