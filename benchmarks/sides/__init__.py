"""Systems that benchmarks compare (sides), each of which runs in a separate process."""
