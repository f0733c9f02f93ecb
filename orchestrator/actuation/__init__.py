"""Carries out operations on groups, for operators and the autoscaler, and reports the cluster's state to the latter."""
