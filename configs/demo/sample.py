"""Samples of the demo's model."""

_base_ = ["../_base_/demo_model.py"]

precision = "fp32"
fps = 8
scheduler = dict(
    num_sampling_steps=30,
    cfg_scale=4.0,
    # Fitted after 2,000 training steps by scripts/fit_cache_curve.py, for a cache_threshold.
    cache_curve=dict(
        model=dict(type="STDiT3", in_channels=27, hidden_size=128, depth=3, num_heads=4),
        path=[
            *(0.0, 0.233, 0.492, 0.675, 0.876, 1.016, 1.154, 1.308, 1.472, 1.615),
            *(1.753, 1.907, 2.059, 2.211, 2.384, 2.516, 2.686, 2.818, 2.989, 3.13),
            *(3.269, 3.381, 3.543, 3.696, 3.844, 3.966, 4.072, 4.189, 4.297, 4.427),
            *(4.553, 4.654, 4.751, 4.873, 4.94, 5.022, 5.102, 5.197, 5.275, 5.359),
            *(5.419, 5.517, 5.583, 5.709, 5.78, 5.869, 5.98, 6.055, 6.296, 6.455),
            *(6.515,),
        ],
        polynomial=[0.3877, -1.015, 0.821, -0.06119, 0.04014],
    ),
)
batch_size = 4
outputs = "outputs/demo/samples"
