"""Plugins for engines: stored chunks behind interfaces of vLLM, SGLang and LMCache, which stay as they are."""
