"""From clips to what a model is trained on: latents and text features, shared by ranks or read from a cache."""
