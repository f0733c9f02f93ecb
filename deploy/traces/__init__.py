"""Shows operators the stages of a single request in the cluster."""
