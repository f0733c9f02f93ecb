"""Traffic simulation: traces, a discrete-event cluster simulator, and a comparison of scaling policies."""
