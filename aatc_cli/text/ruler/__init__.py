"""The thirteen RULER tasks, built here with the tokenizer of the model under evaluation.

The tasks, their wording and their scores are those of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your
Long-Context Language Models?", 2024). Prompts are drawn from a seed: the same seed, tokenizer and text give the same
prompts on any machine.
"""
