"""From clips to what a model is trained on: latents and text features.

Read in this order:

``build``            the dataset, the order of its clips and the encoders of a training config
``sources``          what makes latents and text features: encoders, or a feature cache
``exchange``         which rank encodes what, and the layout of what ranks send each other
``sharded``          the features of one micro-batch, encoded and exchanged by a group of ranks
``corrupt_samples``  the count of files that could not be read
``batch``            random draws of a micro-batch, and the arguments of model and loss
``cache_writer``     writes a feature cache; ``cached`` checks that it fits a config
"""
