"""Weights: what noise in a latent costs, one in each file."""
