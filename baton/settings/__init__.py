"""Settings of all parts: how they are declared and checked, and where a worker runs."""
