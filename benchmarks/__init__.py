"""Benchmarks. Each module answers one question, and is run as `python -m benchmarks.NAME [--json] [--quick]`. Not part
of the wheel."""
