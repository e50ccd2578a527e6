"""Stages: one file per verb of the command line; each reads artifacts and writes one."""
