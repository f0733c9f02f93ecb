"""Tells the autoscaler of a running cluster, and carries its decisions out."""
