"""What the tasks share that score windows of held-out text."""
