"""Work of groups in the simulator: the batch of a generation group, and the jobs of a prefill chain."""
