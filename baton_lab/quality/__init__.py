"""Measures how much output quality sparse residency policies lose (`baton evaluate`)."""
