"""Settings of the running process: its cores, its garbage collection and its memory; and where it keeps files."""
