"""How report reads a run."""
