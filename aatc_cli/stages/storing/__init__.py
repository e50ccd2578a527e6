"""Stages of stored caches: a store of prefixes, and whether one is worth it."""
