"""Signals of a group in, advantages out. Pure."""
