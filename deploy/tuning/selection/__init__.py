"""Fits the rules by which sparse residency policies choose keys (`baton prepare`). The rules are judged by their cost
in perplexity when a text is read."""
