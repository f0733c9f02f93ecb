"""`baton chaos`: starts a cluster, injects faults selected by a seed, and checks invariants."""
