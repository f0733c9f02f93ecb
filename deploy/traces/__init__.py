"""Shows operators the way of a single request through the cluster."""
