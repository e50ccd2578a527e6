"""Predictions: what of a layer's keys and values is told by what a decoder holds already. One file each."""
