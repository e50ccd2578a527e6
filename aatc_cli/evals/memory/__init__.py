"""Bytes that a cache holds, and the most that was in use."""
