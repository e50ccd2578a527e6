"""The fused cache: codes in tiles of 64 tokens, decoded by CUDA kernels, or by their torch twins on a CPU."""
