"""Starts, drains and flips groups for operators and the autoscaler, and describes the cluster to the autoscaler."""
