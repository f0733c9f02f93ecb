"""The decoder: layers, attention, linear layers, positions and sampling."""
