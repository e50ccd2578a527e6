"""Divergence of a continuation that reads its prefix out of stored chunks."""
