"""Time of collect and whiten."""
