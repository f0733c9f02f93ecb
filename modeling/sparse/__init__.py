"""Fit and keep the bases by which keys are chosen."""
