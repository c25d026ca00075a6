"""STDiT3-XL/2 with the video autoencoder and the scheduler of Open-Sora's release 1.2."""

_base_ = ["stdit3_xl2.py"]

vae = dict(
    _delete_=True,
    type="OpenSoraVAE_V1_2",
    from_pretrained="hpcai-tech/OpenSora-VAE-v1.2",
    micro_frame_size=17,
    micro_batch_size=4,
    dtype="bf16",
)
