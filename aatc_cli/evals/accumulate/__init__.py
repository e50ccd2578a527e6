"""Divergence that gathers while a cache is built token by token."""
