"""Allocators: how a budget becomes widths, one in each file."""
