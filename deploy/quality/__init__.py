"""Fits how sparse policies choose keys, and measures what that costs (`baton prepare`, `baton evaluate`)."""
