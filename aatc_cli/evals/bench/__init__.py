"""Speed benches of the fused and the packed cache, and the baselines they are held against."""
