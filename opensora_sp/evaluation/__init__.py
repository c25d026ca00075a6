"""Evaluation of weights: the loss of held-out clips, by bucket and by timestep."""
