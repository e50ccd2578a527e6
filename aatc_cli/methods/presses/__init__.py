"""Presses, one file each: published rules of which tokens of a cache stay."""
