"""Reads a run and never changes it: what is wrong, why, and what to do."""
