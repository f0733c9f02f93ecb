"""Fits the rules by which sparse residency policies select keys for attention (`baton prepare`). A rule is judged by
how much it increases the perplexity of a text."""
