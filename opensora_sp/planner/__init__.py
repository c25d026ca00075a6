"""Estimates of a config's run on a number of GPUs: memory, communication, seconds."""
