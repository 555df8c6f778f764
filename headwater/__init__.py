"""Reinforcement learning of language models, laid out in the order of one sentence."""
