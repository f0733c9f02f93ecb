"""Reports the cluster to operators: state, health and metrics."""
