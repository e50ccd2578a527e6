"""The live compressed cache: one session, one state, and a store for every way to hold tokens."""
