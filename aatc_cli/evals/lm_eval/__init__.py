"""GSM8K, MMLU-Pro, MATH-500 and LongBench, asked by lm-eval."""
