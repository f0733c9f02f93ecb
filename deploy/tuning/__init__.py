"""Measures and fits what serving goes by: a cost model's rates, and how a model's keys are chosen."""
