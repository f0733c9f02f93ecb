"""Utilities that every Baton process uses: cores, garbage collection, free memory, crash notes, and tasks that never
end."""
