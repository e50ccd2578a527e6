"""Transforms: what turns a cached vector into latents and back, one in each file."""
