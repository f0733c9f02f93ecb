"""Whole traffic on paper: traces, a discrete-event simulator of a cluster, and scaling policies compared in it."""
