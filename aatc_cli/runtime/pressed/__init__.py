"""Pressed caches: simulated ones of which some tokens are masked, others in every kv head."""
