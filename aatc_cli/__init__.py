"""Attention-aware transform coding of key-value caches: a staged, file-based command-line pipeline."""

__version__ = "0.1.0"
