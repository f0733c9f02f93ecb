"""Reports the state of a running cluster to the autoscaler, and carries out the autoscaler's decisions."""
