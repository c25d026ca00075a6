"""Encoders: the stand-ins, and the real classes on tiny random models, saved and loaded."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from golden_vae import load, saved_pipeline
from safetensors.torch import load_file, save_file

from opensora_sp.checkpoint import hub
from opensora_sp.cli import main
from opensora_sp.config import InferenceConfig, build_component, load_inference_config
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.transforms import scale
from opensora_sp.encoders import (
    LATENT_ENCODERS,
    LatentEncoder,
    independent_pieces,
    planned_latent_size,
)
from opensora_sp.encoders.huggingface import ImageVAE
from opensora_sp.encoders.interface import Piece, TextEncoder, decoded_pieces
from opensora_sp.encoders.open_sora_vae import OpenSoraVAE
from opensora_sp.encoders.standins import HashedBagOfWords, PatchDCTVAE, PatchPoolVAE
from opensora_sp.encoders.t5 import T5TextEncoder, clean_caption

CONFIG = Path(__file__).parents[2] / "configs" / "demo" / "sample.py"


def test_patch_pooling() -> None:
    vae = PatchPoolVAE(pool=(2, 4, 4))
    video = torch.rand(2, 3, 7, 16, 10) * 2 - 1
    latents = vae.encode(video)
    assert isinstance(vae, LatentEncoder)
    assert latents.shape[2:] == vae.latent_size(7, 16, 10) == (4, 4, 3)
    torch.testing.assert_close(latents[0, 0, 0, 0, 0], video[0, 0, :2, :4, :4].mean())
    assert vae.decode(latents, num_frames=7).shape[:4] == (2, 3, 7, 16)
    plain = torch.full((1, 3, 4, 8, 8), 0.25)
    torch.testing.assert_close(vae.decode(vae.encode(plain), num_frames=4), plain)


def test_patch_frequencies() -> None:
    vae = PatchDCTVAE(pool=(2, 8, 4), coefficients=3)
    video = torch.rand(2, 3, 7, 20, 10, dtype=torch.float64) * 2 - 1
    latents = vae.encode(video)
    assert isinstance(vae, LatentEncoder) and latents.shape == (2, 27, 4, 3, 3)
    assert vae.latent_size(7, 20, 10) == (4, 3, 3) and latents.dtype == torch.float64
    torch.testing.assert_close(latents[0, 9, 0, 1, 1], 1.8 * video[0, 1, :2, 8:16, 4:8].mean())

    # Decoded patches have the frequencies of the latents.
    decoded = vae.decode(latents, num_frames=7)
    assert decoded.shape == (2, 3, 7, 24, 12) and decoded.dtype == torch.float32
    torch.testing.assert_close(vae.encode(decoded).double(), latents, atol=1e-5, rtol=1e-5)
    plain = torch.tensor([0.5, -0.25, 1.0]).view(1, 3, 1, 1, 1).expand(1, 3, 1, 16, 12)
    torch.testing.assert_close(vae.decode(vae.encode(plain), num_frames=1), plain)

    # All coefficients describe still frames completely.
    whole = PatchDCTVAE(pool=(1, 4, 4), coefficients=4)
    back = whole.decode(whole.encode(video[..., :8]), num_frames=7)
    torch.testing.assert_close(back.double(), video[..., :8], atol=1e-5, rtol=1e-5)
    for options in (dict(pool=(2, 2, 4)), dict(coefficients=17)):
        with pytest.raises(ValueError, match="got pool .*; expected .*; change vae.pool or"):
            PatchDCTVAE(**options)


def test_patch_frequencies_show_no_edges_of_patches() -> None:
    """Pixels of decoded clips are no further apart across patches than inside of them."""
    vae = PatchDCTVAE()
    clips = torch.stack([torch.from_numpy(toy_clip(8, i).draw(8, 64)) for i in range(8)])
    video = scale(clips.permute(0, 4, 1, 2, 3))
    decoded = vae.decode(vae.encode(video), num_frames=8)

    for dim in (3, 4):
        jumps = decoded.diff(dim=dim).abs().mean([d for d in range(5) if d != dim])
        assert jumps[15::16].mean() < 1.5 * jumps.mean()


def test_hashed_words_tell_word_order_apart() -> None:
    encoder = HashedBagOfWords(width=8, max_length=6)
    y, mask = encoder.encode(["red on blue", "blue on red", "a b c d e f g", ""])
    assert isinstance(encoder, TextEncoder) and y.shape == (4, 1, 6, 8)
    assert mask.sum(1).tolist() == [5, 5, 6, 0]
    assert torch.equal(y, encoder.encode(["red on blue", "blue on red", "a b c d e f g", ""])[0])
    first, second = ({tuple(token.tolist()) for token in text[0]} for text in y[:2])
    assert first != second


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder / "vae")
    return folder


@pytest.fixture(scope="module")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about, tensors = load("pipeline/chunked")
    return saved_pipeline(tmp_path_factory.mktemp("video_vae"), about, tensors, about["cases"][0])


def test_autoencoder_kl_frame_by_frame(image_folder: Path) -> None:
    encoder = ImageVAE(str(image_folder), subfolder="vae", micro_batch_size=3)
    video = torch.rand(2, 3, 5, 16, 12) * 2 - 1
    seen = []
    vae = encoder.frames.module
    vae.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    latents = encoder.encode(video)

    assert seen == [3, 3, 3, 1]
    assert isinstance(encoder, LatentEncoder) and encoder.channels == 4
    assert tuple(latents.shape[2:]) == encoder.latent_size(5, 16, 12) == (5, 8, 6)

    one = vae.encode(video[1, :, 3][None]).latent_dist.mode()[0] * vae.config.scaling_factor
    torch.testing.assert_close(latents[1, :, 3], one)
    decoded = encoder.decode(latents, num_frames=5)
    assert decoded.shape == video.shape

    frame = vae.decode(one[None] / vae.config.scaling_factor).sample[0]
    torch.testing.assert_close(decoded[1, :, 3], frame)
    other = ImageVAE(str(image_folder), subfolder="vae", micro_batch_size=None, scaling_factor=0.5)
    torch.testing.assert_close(other.encode(video) * other.scale, latents * encoder.scale)

    for one_of, calls in ((encoder, [3, 2]), (other, [5])):  # what sampling decodes at a time
        pieces = decoded_pieces(one_of, 5, 5)
        assert [piece.frames.stop - piece.frames.start for piece in pieces] == calls


@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_a_chunk_may_be_longer_than_a_clip(video_folder: Path, num_frames: int) -> None:
    """Images and short clips are one piece, as large as `plan` says, and keep their size."""
    video = torch.rand(1, 3, num_frames, 16, 24) * 2 - 1
    whole = OpenSoraVAE(str(video_folder), micro_frame_size=None)
    chunked = dict(type="OpenSoraVAE_V1_2", from_pretrained=str(video_folder), micro_frame_size=17)
    pooled = dict(type="PatchPoolVAE", pool=(4, 4, 4))

    for described in (chunked, pooled):
        options = {key: option for key, option in described.items() if key != "type"}
        vae = LATENT_ENCODERS[described["type"]](**options)
        latents = vae.encode(video)
        assert tuple(latents.shape[2:]) == planned_latent_size(described, num_frames, 16, 24)
        assert vae.decode(latents, num_frames=num_frames).shape == video.shape
        pieces = independent_pieces(vae, num_frames=num_frames, latent_frames=latents.shape[2])
        assert pieces == [Piece(slice(0, num_frames), slice(0, 1))]
        if described is chunked:
            torch.testing.assert_close(latents, whole.encode(video))

    mean = video.unflatten(-1, (6, 4)).unflatten(-3, (4, 4)).mean((2, 4, 6))
    torch.testing.assert_close(PatchPoolVAE((4, 4, 4)).encode(video)[:, :, 0], mean)
    smaller, size = PatchPoolVAE((4, 32, 32)), (num_frames, 16, 24)
    assert tuple(smaller.encode(video).shape[2:]) == smaller.latent_size(*size) == (1, 1, 1)


def test_every_run_of_pieces_stands_alone(image_folder: Path, video_folder: Path) -> None:
    """What ranks share out: encoded and decoded apart, the same as in one."""
    encoders = [
        (PatchPoolVAE(pool=(1, 4, 4)), 5),
        (PatchDCTVAE(pool=(1, 8, 8)), 5),
        (PatchPoolVAE(pool=(2, 4, 4)), 1),
        (ImageVAE(str(image_folder), subfolder="vae"), 5),
        (OpenSoraVAE(str(video_folder), micro_frame_size=2), 3),
    ]
    video = torch.rand(2, 3, 5, 16, 24) * 2 - 1

    for vae, count in encoders:
        latents = vae.encode(video)
        decoded = vae.decode(latents, num_frames=5)
        pieces = independent_pieces(vae, num_frames=5, latent_frames=latents.shape[2])
        assert len(pieces) == count
        for first in range(count):
            for last in range(first, count):
                frames = slice(pieces[first].frames.start, pieces[last].frames.stop)
                places = slice(pieces[first].latents.start, pieces[last].latents.stop)
                torch.testing.assert_close(vae.encode(video[:, :, frames]), latents[:, :, places])
                part = vae.decode(latents[:, :, places], num_frames=frames.stop - frames.start)
                torch.testing.assert_close(part, decoded[:, :, frames])

    with pytest.raises(ValueError, match="got 5 frames and 2 latent frames, which are 3 and 2"):
        independent_pieces(encoders[-1][0], num_frames=5, latent_frames=2)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece
    from transformers import T5Config, T5EncoderModel

    folder = tmp_path_factory.mktemp("t5")
    (folder / "corpus.txt").write_text("a red circle moving right on a blue background\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "spiece"),
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder / "model")
    shutil.copyfile(folder / "spiece.model", folder / "model" / "spiece.model")
    return folder / "model"


def test_captions_are_tokenized_as_by_transformers(t5_folder: Path, tmp_path: Path) -> None:
    """From either file."""
    from transformers import T5Tokenizer

    reference = T5Tokenizer.from_pretrained(t5_folder, extra_ids=0)
    described = shutil.copytree(t5_folder, tmp_path / "t5")
    reference.save_pretrained(described)
    (described / "spiece.model").unlink()
    encoder, other = (T5TextEncoder(str(folder)) for folder in (t5_folder, described))
    for text in ("", "a  blue\tcircle \n", "a red circle moving, not 2 中文"):
        assert [*encoder.tokenizer(text), 1] == reference(text).input_ids
        assert encoder.num_tokens(text) == len(reference(text).input_ids)
        assert other.tokenizer(text) == encoder.tokenizer(text)

    # Full width is normalized, and names of special tokens are text.
    assert encoder.tokenizer("\uff52\uff45\uff44") == encoder.tokenizer("red")
    assert not {0, 1} & {*encoder.tokenizer("a</s> <pad> red")}

    # Of another model, where the end token has another id.
    content = json.loads((described / "tokenizer.json").read_text())
    content["model"]["vocab"][0:2] = content["model"]["vocab"][1::-1]
    (described / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its tokenizer cannot .*its special tokens are"):
        T5TextEncoder(str(described))


def test_t5(t5_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    encoder = T5TextEncoder(str(t5_folder), max_length=12)
    with caplog.at_level(logging.WARNING, logger="opensora_sp"):
        y, mask = encoder.encode(["a", "a red circle moving right on a blue background, and on"])
        encoder.encode(["a red circle moving right on a blue background, and on"])

    assert isinstance(encoder, TextEncoder) and encoder.width == 16
    assert y.shape == (2, 1, 12, 16) and mask.shape == (2, 12)
    assert mask[0].sum() < 12 and mask[1].sum() == 12

    (message,) = caplog.messages
    assert "is truncated to text_encoder.max_length = 12" in message

    alone = encoder.encode(["a"])
    # Padding changes nothing.
    torch.testing.assert_close(alone[0][0, 0, : alone[1].sum()], y[0, 0, : mask[0].sum()])


def test_cleaned_captions(t5_folder: Path) -> None:
    raw = "A  RED circle <b>moving</b> &amp; right https://example.com #123 @somebody clip_0001.mp4"
    assert clean_caption(raw) == "a red circle moving right"
    plain, cleaning = (
        T5TextEncoder(str(t5_folder), max_length=40, clean_captions=c) for c in (False, True)
    )
    wanted, mask = plain.encode(["a red circle moving right"])
    found, found_mask = cleaning.encode([raw])
    assert torch.equal(mask, found_mask) and torch.equal(found, wanted)
    assert not torch.equal(plain.encode([raw])[1], mask)


def assert_rounded(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert 0 < (ours - theirs).abs().max() < 0.1 * theirs.abs().max()


def test_half_precision(image_folder: Path, video_folder: Path, t5_folder: Path) -> None:
    video = torch.rand(1, 3, 5, 16, 16) * 2 - 1
    for cls, options in [
        (ImageVAE, dict(from_pretrained=str(image_folder), subfolder="vae")),
        (OpenSoraVAE, dict(from_pretrained=str(video_folder))),
    ]:
        whole, half = cls(**options), cls(**options, dtype="bf16")
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        latents = whole.encode(video)
        assert_rounded(half.encode(video), latents)
        assert_rounded(*(vae.decode(latents, num_frames=5) for vae in (half, whole)))

    vae = OpenSoraVAE(str(video_folder), dtype="fp16")
    assert vae.scale.dtype == vae.shift.dtype == torch.float32  # 3.85 is 3.84 in bf16
    assert vae.scale.flatten().tolist() == pytest.approx([3.85, 2.32, 2.33, 3.06])

    whole, half = (
        T5TextEncoder(str(t5_folder), max_length=12, dtype=dtype) for dtype in ("fp32", "bf16")
    )
    assert_rounded(*(encoder.encode(["a red circle"])[0] for encoder in (half, whole)))


def test_offloaded_weights_are_on_the_device_only_while_they_work(
    image_folder: Path, video_folder: Path, t5_folder: Path
) -> None:
    """Torch's device without storage stands for a GPU."""
    device, video = torch.device("meta"), torch.rand(1, 3, 5, 16, 16)
    image_vae = ImageVAE(str(image_folder), subfolder="vae", offload=True)
    video_vae = OpenSoraVAE(str(video_folder), offload=True)
    text_encoder = T5TextEncoder(str(t5_folder), max_length=8, offload=True)
    encoders = [
        (image_vae, lambda vae: vae.encode(video)),
        (image_vae, lambda vae: vae.decode(torch.rand(1, 4, 5, 8, 8), num_frames=5)),
        (video_vae, lambda vae: vae.encode(video)),
        (video_vae, lambda vae: vae.decode(torch.rand(1, 4, 2, 2, 2), num_frames=5)),
        (text_encoder, lambda t5: t5.encode(["a red circle"])[0]),
    ]

    for encoder, work in encoders:
        before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        assert encoder.to(device) is encoder and not any(
            tensor.is_meta for tensor in encoder.state_dict().values()
        )
        assert work(encoder).device == device  # so the weights were there
        after = encoder.state_dict()
        assert list(after) == list(before) and all(
            torch.equal(after[name], before[name]) for name in before
        )
        with encoder.on_device():
            assert all(tensor.is_meta for tensor in encoder.state_dict().values())
        assert not any(tensor.is_meta for tensor in encoder.state_dict().values())

    with pytest.raises(RuntimeError, match="lost"), encoder.on_device():
        raise RuntimeError("lost")
    assert not any(tensor.is_meta for tensor in encoder.state_dict().values())


ENCODERS = [(ImageVAE, "vae"), (OpenSoraVAE, "vae"), (T5TextEncoder, "text_encoder")]


@pytest.mark.parametrize(("cls", "key"), ENCODERS)
def test_missing_weights_name_the_local_folder_way(
    cls: type, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=rf"got {key}.from_pretrained .*hf download"):
        cls(str(tmp_path))
    monkeypatch.setattr(hub, "answers", lambda: False)
    there = f"got {key}.from_pretrained 'nobody/nothing', which is not on disk .*"
    there += "not in the hub's cache, while the hub cannot be reached"
    with pytest.raises(ValueError, match=rf"{there}.*hf download"):
        cls("nobody/nothing")


@pytest.mark.parametrize(("cls", "key"), ENCODERS)
def test_incomplete_and_damaged_weights_are_refused(
    cls: type, key: str, sources: dict[type, Path]
) -> None:
    folder = sources[cls]
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    name = next(name for name in state if name.endswith("weight") and "norm" not in name)
    save_file({k: v for k, v in state.items() if k != name}, file, metadata={"format": "pt"})

    with pytest.raises(ValueError, match=f"(?i)missing.*{name}|{name} is one"):
        cls(str(folder))
    save_file({**state, name: state[name][..., :1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"got (weights of another autoencoder|{key}.from_pretrained)"
    ):
        cls(str(folder))

    save_file(state, file, metadata={"format": "pt"})
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"got {key}.from_pretrained .*whose weights cannot be"):
        cls(str(folder))

    # As of a name on the hub that is not an encoder's.
    file.unlink()
    (folder / "README.md").touch()
    with pytest.raises(ValueError, match=f"got {key}.from_pretrained .*holds no weights"):
        cls(str(folder))


def test_released_layout_is_strict_and_takes_older_names(
    video_folder: Path, sources: dict[type, Path]
) -> None:
    folder = sources[OpenSoraVAE]
    state = load_file(folder / "model.safetensors")
    save_file({**state, "spatial_vae.module.more": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="Unexpected key.*spatial_vae.module.more"):
        OpenSoraVAE(str(folder))

    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = dict(state)
    for name in state:
        for new, old in older.items():
            if f"attentions.0.{new}." in name:
                renamed[name.replace(new, old)] = renamed.pop(name)

    assert sum(name not in state for name in renamed) == 16
    save_file(renamed, folder / "model.safetensors")
    video = torch.rand(1, 3, 3, 16, 16)
    assert torch.equal(
        OpenSoraVAE(str(folder)).encode(video), OpenSoraVAE(str(video_folder)).encode(video)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"vae_temporal": {"type": "VAE_Temporal_SD", "filter": 4}},
            "got vae_temporal {'filter': 4} .*'filter'",
        ),
        (
            {"vae_temporal": {"temporal_downsample": [True, True]}},
            "got temporal_downsample .True, True. for",
        ),
        (
            {"vae_temporal": {"temporal_downsample": [True, True, True]}},
            "with 8 frames and 8 pixels .*expected 4 and 8",
        ),
    ],
)
def test_other_autoencoders_are_refused(
    change: dict, message: str, video_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((video_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        OpenSoraVAE(str(tmp_path))


OWN = '''
import torch
from torch import nn


class MeanVAE(nn.Module):
    """Every frame's mean colour."""

    channels, scale = 3, 1.0
    chunk_frames = chunk_latent_frames = 1

    def __init__(self, gain: float = 1.0):
        super().__init__()
        self.gain = gain

    def encode(self, video):
        return self.gain * video.mean((3, 4), keepdim=True)

    def decode(self, latents, *, num_frames):
        return latents.expand(-1, -1, -1, 8, 8) / self.gain

    def latent_size(self, num_frames, height, width):
        return num_frames, 1, 1


class Half:
    def encode(self, video):
        return video


class AnyOption(MeanVAE):
    def __init__(self, **options):
        super().__init__(options["gain"])
'''


def test_a_class_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_encoders.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load_with(vae: str) -> InferenceConfig:
        (tmp_path / "config.py").write_text(
            f"_base_ = [{str(CONFIG)!r}]\nvae = dict(_delete_=True, {vae})\n"
        )
        return load_inference_config(tmp_path / "config.py")

    cfg = load_with("type='my_encoders.MeanVAE', gain=2")
    vae = build_component(cfg.vae, LATENT_ENCODERS)
    assert isinstance(vae, LatentEncoder) and vae.gain == 2.0
    assert planned_latent_size(cfg.vae, 7, 16, 16) == (7, 1, 1)
    assert len(independent_pieces(vae, num_frames=7, latent_frames=7)) == 7
    free = load_with("type='my_encoders.AnyOption', gain=3").vae
    assert build_component(free, LATENT_ENCODERS).gain == 3
    for written, message in [
        ("type='my_encoders.MeanVAE', gian=2", "unknown key 'vae.gian'.*did you mean 'gain'"),
        ("type='my_encoders.MeanVAE', gain='loud'", "got vae.gain = 'loud'; expected a valid"),
        ("type='my_encoders.Mean'", "got vae.type 'my_encoders.Mean', which cannot be imported"),
        ("type='your_encoders.VAE'", "which cannot be imported .No module named 'your_encoders'"),
        ("type='my_encoders.Half'", "got vae.type Half without decode, latent_size, to; expected"),
        (
            "type='OpenSoraVAE_V1_2', from_pretrained='x', dtype='half'",
            "got vae.dtype = 'half'; expected 'fp32'",
        ),
        ("type='VAE'", "got vae.type 'VAE'; expected one of .'OpenSoraVAE_V1_2', .*or a class of"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_with(written)


def pickled(folder: Path, *, shards: int = 1) -> Path:
    """A copy of an encoder's folder with pickles in place of its safetensors."""
    copy = shutil.copytree(folder, folder.parent / f"{folder.name}-pickled")
    (file,) = copy.glob("*.safetensors")
    state = load_file(file)
    file.unlink()

    stem = "diffusion_pytorch_model" if "diffusion" in file.name else "pytorch_model"
    if shards == 1:
        torch.save(state, copy / f"{stem}.bin")
        return copy

    weight_map = {name: f"{stem}-{n % shards + 1:05d}.bin" for n, name in enumerate(state)}
    for shard in set(weight_map.values()):
        torch.save({k: v for k, v in state.items() if weight_map[k] == shard}, copy / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (copy / f"{stem}.bin.index.json").write_text(json.dumps(index))
    return copy


def printed_command(message: str) -> list[str]:
    """The command in an error, without the name of the program."""
    command = message.partition("convert them once: ")[2].partition(", then set")[0]
    program, *arguments = shlex.split(command)
    assert program == "opensora-sp"
    return arguments


@pytest.fixture
def sources(image_folder: Path, video_folder: Path, t5_folder: Path, tmp_path: Path) -> dict:
    folders = {ImageVAE: image_folder / "vae", OpenSoraVAE: video_folder, T5TextEncoder: t5_folder}
    return {cls: shutil.copytree(f, tmp_path / cls.__name__) for cls, f in folders.items()}


@pytest.mark.parametrize(("cls", "key"), ENCODERS)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_error_of_pickles_has_the_command_that_converts_them(
    cls: type, key: str, shards: int, sources: dict[type, Path], tmp_path: Path
) -> None:
    folder = pickled(sources[cls], shards=shards)
    with pytest.raises(ValueError, match=f"got {key}.from_pretrained .* weights are pickled") as e:
        cls(f"{folder}/")

    main(printed_command(str(e.value)))
    converted = str(e.value).rpartition(f"then set {key}.from_pretrained to ")[2]
    assert not list(Path(converted).glob("*.bin*"))

    wanted, found = cls(str(sources[cls])).state_dict(), cls(converted).state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_code_of_a_repository_is_not_executed(sources: dict[type, Path], tmp_path: Path) -> None:
    folder = sources[T5TextEncoder]
    (folder / "own.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    classes = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    classes["AutoTokenizer"] = "own.Tokenizer"
    config = json.loads((folder / "config.json").read_text())
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({**config, "auto_map": classes}))
    T5TextEncoder(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("spiece.model", None, "its tokenizer .*neither spiece.model nor"),
        ("spiece.model", "{}", "its tokenizer cannot be loaded"),
        ("config.json", {"num_layers": "2"}, "T5EncoderModel cannot be loaded"),
        ("config.json", {"num_layers": 1001}, "num_layers 1001 in its config.json, which"),
        ("config.json", {"num_hidden_layers": 1 << 40}, "which may be 1000 at most"),
        ("config.json", {"num_labels": 1 << 40}, "which may be 1000 at most"),
        ("config.json", {"num_layers": 9}, "56 tensors are missing, encoder.block.2.layer.0"),
        ("config.json", {"d_ff": 1 << 40}, r"size mismatch .*\[1099511627776, 16\]"),
    ],
)
def test_hostile_files_of_a_t5_are_one_sentence(
    name: str, content: str | dict | None, message: str, sources: dict[type, Path]
) -> None:
    """Before the encoder that they describe is built in memory."""
    file = sources[T5TextEncoder] / name
    if isinstance(content, dict):
        file.write_text(json.dumps({**json.loads(file.read_text()), **content}))
    elif content is not None:
        file.write_text(content)
    else:
        file.unlink()
    with pytest.raises(ValueError, match=f"got text_encoder.from_pretrained .*{message}"):
        T5TextEncoder(str(file.parent))


@pytest.mark.parametrize("name", ["shared.weight", "encoder.embed_tokens.weight"])
def test_a_t5_may_have_either_name_of_its_embedding(
    name: str, sources: dict[type, Path], t5_folder: Path
) -> None:
    file = sources[T5TextEncoder] / "model.safetensors"
    state = load_file(file)
    embedding = state.pop("shared.weight")
    save_file({**state, name: embedding}, file, metadata={"format": "pt"})
    found, wanted = (T5TextEncoder(str(f)).encode(["a"])[0] for f in (file.parent, t5_folder))
    assert torch.equal(found, wanted)


def cached_repository(folder: Path, cache: Path) -> None:
    """The hub's cache with a folder as the repository "somebody/t5"."""
    repository = cache / "models--somebody--t5"
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)


def test_names_on_the_hub_are_converted_as_well(
    t5_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache here, which earlier versions filled with pickles."""
    copy = shutil.copytree(t5_folder, tmp_path / "t5")
    cached_repository(pickled(copy), tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "answers", lambda: False)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match="'somebody/t5' .*whose weights .* are pickled") as error:
        T5TextEncoder("somebody/t5")
    arguments = printed_command(str(error.value))
    assert arguments == ["convert", "somebody/t5", "t5-safetensors", "--allow-pickle"]
    main(arguments)
    wanted = T5TextEncoder(str(t5_folder)).state_dict()
    found = T5TextEncoder("t5-safetensors").state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_pickles_of_a_repository_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "spiece.model", "pytorch_model.bin", "pytorch_model.bin.index.json"]
    monkeypatch.setattr(hub, "answers", lambda: True)
    monkeypatch.setattr(hub, "snapshot", lambda *_, **__: pytest.fail("downloaded"))
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, revision: files)
    with pytest.raises(ValueError, match="'somebody/bins' .*whose weights .* are pickled"):
        T5TextEncoder("somebody/bins")


def test_convert_keeps_all_names_of_tied_tensors(sources: dict[type, Path], tmp_path: Path) -> None:
    """As T5 with its decoder has: three names of one embedding."""
    folder = sources[T5TextEncoder]
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    tensors["decoder.embed_tokens.weight"] = tensors["shared.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")

    main(["convert", str(folder), str(tmp_path / "out"), "--allow-pickle"])
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    T5TextEncoder(str(tmp_path / "out"))


def test_a_subfolder_is_left_out_of_the_converted_folder(sources: dict[type, Path]) -> None:
    folder = pickled(sources[ImageVAE])
    with pytest.raises(ValueError, match="-safetensors, and remove vae.subfolder$"):
        ImageVAE(str(folder.parent), subfolder=folder.name)


def test_convert_leaves_an_encoder_as_it_is(
    sources: dict[type, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, out = sources[T5TextEncoder], tmp_path / "out"
    arguments = ["convert", str(folder), str(out)]
    for extra, message in [
        (["--dtype", "bf16"], "got --dtype for .*which is a VAE or text encoder"),
        (["--no-ema"], "got --no-ema for"),
        (["--max-shard-size", "many"], "got max_shard_size 'many'"),
    ]:
        with pytest.raises(SystemExit) as left:
            main([*arguments, *extra])
        assert left.value.code == 2 and re.search(message, capsys.readouterr().err)
        assert not out.exists()

    main([*arguments, "--max-shard-size", "2KB"])
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert f"files to {out}" in capsys.readouterr().out
    assert {path.name for path in folder.glob("*.json")} <= {path.name for path in out.iterdir()}
    wanted, found = (T5TextEncoder(str(f)).encode(["a red circle"])[0] for f in (folder, out))
    assert torch.equal(wanted, found)
