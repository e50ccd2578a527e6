"""Calibration and test text: built-in, files, JSON lines and datasets, cut into windows of tokens."""
