"""Shared by several packages: console, files, names, tensors, graphs, randomness."""
