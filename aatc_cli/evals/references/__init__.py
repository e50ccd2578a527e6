"""How likely the written answers of GSM8K, MATH-500 and LongBench are."""
