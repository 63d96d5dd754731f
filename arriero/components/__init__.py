"""Prompt sources, generators, rewards, advantages, losses, trainers: the nodes of a graph."""
