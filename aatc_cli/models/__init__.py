"""Everything that touches transformers: loading, identity, adapters, capture, attention overrides."""
