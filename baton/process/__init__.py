"""What any process of Baton needs for itself: its cores, garbage collection, memory, and tasks that never end."""
