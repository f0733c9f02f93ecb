"""Reports the state of the cluster and of requests to operators: health, metrics, traces and lists of requests."""
