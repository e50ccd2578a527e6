"""Artifacts: the nouns of the pipeline on disk, each with its reader beside its writer."""
