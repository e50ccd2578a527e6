"""Teacher-forced evaluation: one pass over a text that sees the compressed cache as decoding would."""
