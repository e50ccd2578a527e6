"""Divergence from the uncompressed model on held-out text."""
