"""Measures the loss of quality by sparse residencies (`baton evaluate`)."""
