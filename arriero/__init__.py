"""Asynchronous distributed reinforcement learning of language models, as one typed dataflow graph."""

__version__ = "0.1.0"
