"""Perplexity with the compressed cache."""
