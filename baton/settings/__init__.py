"""Settings of all components: how they are declared and checked, and where a worker runs."""
