"""What several benchmarks share: pairs, reports, loads, rates."""
