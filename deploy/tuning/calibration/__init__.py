"""Measures the inputs of the planner's predictions: prefill chains and generation steps of a running cluster."""
