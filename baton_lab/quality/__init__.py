"""Measures what sparse residencies cost in quality (`baton evaluate`)."""
