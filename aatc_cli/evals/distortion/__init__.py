"""Predicted against measured error of the attention output."""
