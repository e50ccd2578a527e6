"""Which tokens of a cache stay, per kv head: what is seen of attention, how places are shared out, and the state."""
