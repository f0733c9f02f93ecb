"""The configuration of a cluster and of one worker, and how it is read from files and options."""
