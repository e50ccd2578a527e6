"""RULER, by generation."""
