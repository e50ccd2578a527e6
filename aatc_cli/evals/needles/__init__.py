"""Retrieval by context and depth."""
