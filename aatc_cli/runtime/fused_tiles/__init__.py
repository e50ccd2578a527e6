"""The fused cache of tiles with classes: records of 16 tokens that a Hopper kernel decodes where they lie."""
