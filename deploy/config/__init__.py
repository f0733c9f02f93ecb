"""Configuration of a cluster and of one worker, and the functions that read it from files and options."""
