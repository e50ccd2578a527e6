"""Several questions about one text, asked one after another."""
