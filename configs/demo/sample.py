"""Samples of the demo's model."""

_base_ = ["../_base_/demo_model.py"]

precision = "fp32"
fps = 8
scheduler = dict(
    num_sampling_steps=30,
    cfg_scale=2.0,
    # Of the shipped model, by scripts/fit_cache_curve.py, for a cache_threshold.
    cache_curve=dict(
        model=dict(type="STDiT3", in_channels=27, hidden_size=128, depth=2, num_heads=4),
        path=[
            *(0.0, 0.355, 0.51, 0.609, 0.678, 0.754, 0.827, 0.883, 0.949, 1.009),
            *(1.05, 1.114, 1.174, 1.24, 1.298, 1.365, 1.429, 1.484, 1.574, 1.647),
            *(1.703, 1.772, 1.831, 1.908, 1.997, 2.068, 2.14, 2.215, 2.296, 2.389),
            *(2.476, 2.55, 2.663, 2.733, 2.827, 2.924, 2.983, 3.091, 3.163, 3.211),
            *(3.297, 3.397, 3.486, 3.605, 3.745, 3.837, 4.038, 4.172, 4.328, 4.583),
            *(4.65,),
        ],
        polynomial=[2.807, -3.784, 1.573, 0.1489, 0.01142],
    ),
)
batch_size = 4
outputs = "outputs/demo/samples"
