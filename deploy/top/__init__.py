"""`baton top`: a cluster as it works, in a terminal."""
