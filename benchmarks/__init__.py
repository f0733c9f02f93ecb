"""Benchmarks, one module per question: `python -m benchmarks.NAME [--json] [--quick]`. Not part of the wheel."""
