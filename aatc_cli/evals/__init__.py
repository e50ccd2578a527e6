"""Evaluations: one file per task, one JSON per evaluation."""
