"""The live compressed cache: packed storage, attention over it, and its life under ``generate``."""
