"""Stored caches: chunks of tokens as bytes that outlive a process, and prefixes made of them."""
