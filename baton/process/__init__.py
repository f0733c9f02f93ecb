"""Parts of every Baton process: its cores, garbage collection, memory, and tasks that never end."""
