"""Runs a cluster of its own under seeded faults and checks what must hold (`baton chaos`)."""
