"""Fits and stores the bases by which keys are selected."""
