"""Benchmarks, one module for each question: `python -m benchmarks.NAME [--json] [--quick]`. Not in the wheel."""
