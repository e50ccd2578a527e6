"""Fused decode kernels: static tables of a layer, their launch, and what of them needs a CUDA device."""
