"""Settings of a small model, of which a test changes what it is about: ``dict(TINY, depth=1)``."""

TINY = dict(
    in_channels=2,
    hidden_size=24,
    depth=2,
    num_heads=3,
    caption_channels=5,
    model_max_length=6,
    mlp_ratio=2.0,
)
