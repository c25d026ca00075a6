"""What several packages share: console, files, names, tensors, graphs, randomness."""
