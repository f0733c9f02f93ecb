"""Measures the numbers that the planner predicts by: prefill chains and generation steps of a running cluster."""
