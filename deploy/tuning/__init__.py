"""Measures and fits parameters of serving: the rates of a cost model, and how a model's keys are chosen."""
