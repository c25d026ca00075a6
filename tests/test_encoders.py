"""Encoders: the stand-ins, and the real classes on tiny random models that were saved and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opensora_sp.encoders import HashedBagOfWords, ImageVAE, LatentEncoder, PatchPoolVAE, T5TextEncoder, TextEncoder


def test_patch_pooling() -> None:
    vae = PatchPoolVAE(pool=(2, 4, 4))
    video = torch.rand(2, 3, 7, 16, 10) * 2 - 1
    latents = vae.encode(video)
    assert isinstance(vae, LatentEncoder) and latents.shape[2:] == vae.latent_size(7, 16, 10) == (4, 4, 3)
    torch.testing.assert_close(latents[0, 0, 0, 0, 0], video[0, 0, :2, :4, :4].mean())
    assert vae.decode(latents, num_frames=7).shape[:4] == (2, 3, 7, 16)
    plain = torch.full((1, 3, 4, 8, 8), 0.25)
    torch.testing.assert_close(vae.decode(vae.encode(plain), num_frames=4), plain)


def test_hashed_words_tell_word_order_apart() -> None:
    encoder = HashedBagOfWords(width=8, max_length=6)
    y, mask = encoder.encode(["red on blue", "blue on red", "a b c d e f g", ""])
    assert isinstance(encoder, TextEncoder) and y.shape == (4, 1, 6, 8) and mask.sum(1).tolist() == [5, 5, 6, 0]
    assert torch.equal(y, encoder.encode(["red on blue", "blue on red", "a b c d e f g", ""])[0])
    first, second = ({tuple(token.tolist()) for token in text[0]} for text in y[:2])
    assert first != second


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder / "vae")
    return folder


def test_autoencoder_kl_frame_by_frame(vae_folder: Path) -> None:
    encoder = ImageVAE(str(vae_folder), subfolder="vae", micro_batch_size=3)
    video = torch.rand(2, 3, 5, 16, 12) * 2 - 1
    latents = encoder.encode(video)
    assert isinstance(encoder, LatentEncoder) and encoder.channels == 4
    assert tuple(latents.shape[2:]) == encoder.latent_size(5, 16, 12) == (5, 8, 6)
    one = encoder.vae.encode(video[1, :, 3][None]).latent_dist.mode()[0] * encoder.vae.config.scaling_factor
    torch.testing.assert_close(latents[1, :, 3], one)
    decoded = encoder.decode(latents, num_frames=5)
    assert decoded.shape == video.shape
    frame = encoder.vae.decode(one[None] / encoder.vae.config.scaling_factor).sample[0]
    torch.testing.assert_close(decoded[1, :, 3], frame)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    folder = tmp_path_factory.mktemp("t5")
    (folder / "corpus.txt").write_text("a red circle moving right on a blue background\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "spiece"), vocab_size=40, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    T5Tokenizer(str(folder / "spiece.model"), extra_ids=0, legacy=True).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder / "model")
    return folder / "model"


def test_t5(t5_folder: Path) -> None:
    encoder = T5TextEncoder(str(t5_folder), max_length=12)
    y, mask = encoder.encode(["a", "a red circle moving right on a blue background, and on"])
    assert isinstance(encoder, TextEncoder) and encoder.width == 16
    assert y.shape == (2, 1, 12, 16) and mask.shape == (2, 12) and mask[0].sum() < 12 and mask[1].sum() == 12
    alone = encoder.encode(["a"])
    torch.testing.assert_close(alone[0][0, 0, : alone[1].sum()], y[0, 0, : mask[0].sum()])  # padding changes nothing


@pytest.mark.parametrize(("cls", "key"), [(ImageVAE, "vae"), (T5TextEncoder, "text_encoder")])
def test_missing_weights_name_the_local_folder_way(cls: type, key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"got {key}.from_pretrained .* set {key}.from_pretrained to a folder"):
        cls(str(tmp_path))
