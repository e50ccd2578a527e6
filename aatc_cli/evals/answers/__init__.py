"""What the tasks share that score generated answers."""
