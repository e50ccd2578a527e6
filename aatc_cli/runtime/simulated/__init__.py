"""Simulated caches: full vectors, replaced by what a codec gives back, for methods without a packed form."""
