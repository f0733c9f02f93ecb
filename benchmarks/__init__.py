"""Measurements, one module a question: `python -m benchmarks.NAME [--json] [--quick]`. Not in the wheel."""
