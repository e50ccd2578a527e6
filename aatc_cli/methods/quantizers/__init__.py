"""Quantizers: how latents become codes, one in each file."""
