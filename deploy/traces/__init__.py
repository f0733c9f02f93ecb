"""Shows the stages of a single request in the cluster to operators."""
