"""vLLM: an attention backend whose cache is a plan's tiles, registered as CUSTOM by the entry point of `plugin`."""
