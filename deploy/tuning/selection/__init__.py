"""Fits how sparse residencies choose keys, by what reading a text costs (`baton prepare`)."""
