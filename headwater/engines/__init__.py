"""Prompts in, sampled spans out, on weights that may change while running."""
