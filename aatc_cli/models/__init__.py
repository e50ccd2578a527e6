"""Everything that touches transformers: loading, identity, adapters, capture, attention overrides."""

from aatc_cli.models.requirements import check_transformers

# before any import of transformers below here, whose names differ outside the supported releases
check_transformers()
