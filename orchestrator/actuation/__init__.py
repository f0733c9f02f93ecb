"""Starts groups, drains groups and changes their role, for operators and the autoscaler. Also describes the cluster to
the autoscaler."""
