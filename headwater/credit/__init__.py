"""Signals of a group in, advantages out. Pure; the few credits that must remember keep it in `state`."""
