"""Admission of requests: a bounded, fair queue, and the refusal of requests that do not fit."""
