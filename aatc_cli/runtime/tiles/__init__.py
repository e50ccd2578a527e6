"""The tile form: packed tokens in tiles of constant bytes, each token at the widths of its class."""
