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
            *(0.0, 0.333, 0.657, 0.872, 1.102, 1.298, 1.479, 1.675, 1.887, 2.111),
            *(2.333, 2.575, 2.828, 3.058, 3.31, 3.482, 3.632, 3.788, 3.986, 4.147),
            *(4.29, 4.433, 4.566, 4.707, 4.796, 4.924, 5.043, 5.147, 5.277, 5.384),
            *(5.49, 5.589, 5.722, 5.827, 5.931, 6.02, 6.107, 6.205, 6.271, 6.365),
            *(6.455, 6.537, 6.596, 6.673, 6.769, 6.828, 6.966, 7.103, 7.247, 7.435),
            *(7.614,),
        ],
        polynomial=[0.01967, -0.04082, -0.02833, 0.1981, 0.02086],
    ),
)
batch_size = 4
outputs = "outputs/demo/samples"
