"""Fits and keeps the bases by which keys are chosen."""
