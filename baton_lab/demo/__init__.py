"""Shows a cluster at work (`make demo`)."""
