"""Names and numbers that are read once and needed again far behind."""
