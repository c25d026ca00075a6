"""Tiny transformers of diffusers with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from random_weights import draw_weights
from torch import nn

Case = tuple[nn.Module, dict[str, Any]]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def wan(heads: int = 3, samples: int = 2, frames: int = 3, **config: Any) -> Case:
    from diffusers import WanTransformer3DModel

    settings = dict(
        num_attention_heads=heads,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        text_dim=6,
        freq_dim=8,
        ffn_dim=16,
        num_layers=2,
        rope_max_seq_len=16,
    )
    model = WanTransformer3DModel(**settings | config)
    inputs = dict(
        hidden_states=numbers(samples, 4, frames, 6, 10),
        timestep=torch.tensor([3.0, 700.0])[:samples],
        encoder_hidden_states=numbers(samples, 5, 6),
    )
    return model, inputs


def wan_pipeline(transformer: nn.Module) -> Any:
    """A pipeline of tiny parts, which takes embeddings for prompts."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    return WanPipeline(None, None, vae, scheduler, transformer)


def flux(heads: int = 5, samples: int = 2, text: int = 7) -> Case:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=6,
        pooled_projection_dim=6,
        guidance_embeds=False,
        axes_dims_rope=(4, 2, 2),
    )
    ids = torch.zeros(11, 3)
    ids[:, 1] = torch.arange(11)
    inputs = dict(
        hidden_states=numbers(samples, 11, 4),
        encoder_hidden_states=numbers(samples, text, 6),
        pooled_projections=numbers(samples, 6),
        timestep=torch.tensor([0.3, 0.7])[:samples],
        img_ids=ids,
        txt_ids=torch.zeros(text, 3),
    )
    return model, inputs


def qwen(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=6,
        axes_dims_rope=(4, 2, 2),
    )
    mask = torch.ones(samples, 7)
    mask[-1, 4:] = 0
    inputs = dict(
        hidden_states=numbers(samples, 15, 4),
        encoder_hidden_states=numbers(samples, 7, 6),
        encoder_hidden_states_mask=mask,
        timestep=torch.tensor([0.3, 0.7])[:samples],
        img_shapes=[[(1, 3, 5)]] * samples,
    )
    return model, inputs


def ltx(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=8,
        cross_attention_dim=8 * heads,
        num_layers=2,
        caption_channels=6,
    )
    mask = torch.ones(samples, 7)
    mask[-1, 4:] = 0
    inputs = dict(
        hidden_states=numbers(samples, 30, 4),
        encoder_hidden_states=numbers(samples, 7, 6),
        encoder_attention_mask=mask,
        timestep=torch.tensor([[3.0], [700.0]])[:samples],
        num_frames=2,
        height=3,
        width=5,
    )
    return model, inputs


def hunyuan(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=False,
        text_embed_dim=6,
        pooled_projection_dim=6,
        rope_axes_dim=(4, 2, 2),
    )
    mask = torch.ones(samples, 7)
    mask[-1, 4:] = 0
    inputs = dict(
        hidden_states=numbers(samples, 4, 2, 3, 5),
        encoder_hidden_states=numbers(samples, 7, 6),
        encoder_attention_mask=mask,
        pooled_projections=numbers(samples, 6),
        timestep=torch.tensor([3, 700])[:samples],
    )
    return model, inputs


def cogvideox(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=6,
        num_layers=2,
        sample_width=10,
        sample_height=6,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=7,
        use_rotary_positional_embeddings=True,
    )
    table = numbers(3 * 3 * 5, 16)
    inputs = dict(
        hidden_states=numbers(samples, 3, 4, 6, 10),
        encoder_hidden_states=numbers(samples, 7, 6),
        timestep=torch.tensor([3, 700])[:samples],
        image_rotary_emb=(table.cos(), table.sin()),
    )
    return model, inputs


def flux2(heads: int = 3, samples: int = 2, text: int = 7) -> Case:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=6,
        timestep_guidance_channels=8,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=False,
    )
    ids = torch.zeros(samples, 11, 4)
    ids[:, :, 1] = torch.arange(11)
    inputs = dict(
        hidden_states=numbers(samples, 11, 4),
        encoder_hidden_states=numbers(samples, text, 6),
        timestep=torch.tensor([0.3, 0.7])[:samples],
        img_ids=ids,
        txt_ids=torch.zeros(samples, text, 4),
    )
    return model, inputs


def chronoedit(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import ChronoEditTransformer3DModel

    model = ChronoEditTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        text_dim=6,
        freq_dim=8,
        ffn_dim=16,
        num_layers=2,
        rope_max_seq_len=16,
        rope_temporal_skip_len=2,
    )
    inputs = dict(
        hidden_states=numbers(samples, 4, 3, 6, 10),
        timestep=torch.tensor([3.0, 700.0])[:samples],
        encoder_hidden_states=numbers(samples, 5, 6),
    )
    return model, inputs


def helios(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import HeliosTransformer3DModel

    model = HeliosTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        text_dim=6,
        freq_dim=8,
        ffn_dim=16,
        num_layers=2,
        rope_dim=(4, 2, 2),
    )
    inputs = dict(
        hidden_states=numbers(samples, 4, 3, 6, 10),
        timestep=torch.tensor([3.0, 700.0])[:samples],
        encoder_hidden_states=numbers(samples, 5, 6),
        indices_latents_history_short=torch.arange(2).expand(samples, 2),
        latents_history_short=numbers(samples, 4, 2, 6, 10, seed=1),
        indices_hidden_states=torch.arange(2, 5).expand(samples, 3),
    )
    return model, inputs


def minimax(heads: int = 3, samples: int = 2) -> Case:
    from diffusers import MiniMaxH3Transformer3DModel

    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=8,
        hidden_size=12,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=16,
        in_channels=4,
        audio_in_channels=5,
        text_dim=6,
        freq_dim=8,
        time_embed_hidden_dim=12,
        time_embed_dim=6,
        rope_freq_dim=1,
    )
    text, video, audio = 3, 11, 4
    tags = torch.tensor([1] * text + [0] * video + [2] * audio)
    ids = torch.stack([torch.arange(18), torch.arange(18) % 3, torch.arange(18) % 5], dim=1)
    inputs = dict(
        hidden_states=numbers(samples, video, 16),
        audio_hidden_states=numbers(samples, audio, 5),
        encoder_hidden_states=numbers(samples, text, 6),
        timestep=torch.tensor([0.3, 0.7]),
        timestep_indices=(tags == 0).long(),
        token_tags=tags,
        position_ids=ids,
        text_indices=(tags == 1).nonzero().flatten(),
        video_indices=(tags == 0).nonzero().flatten(),
        audio_indices=(tags == 2).nonzero().flatten(),
    )
    return model, inputs


def ltx2(heads: int = 3, samples: int = 2, rope_type: str = "interleaved") -> Case:
    from diffusers import LTX2VideoTransformer3DModel

    model = LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=heads,
        attention_head_dim=8,
        cross_attention_dim=8 * heads,
        audio_in_channels=5,
        audio_out_channels=5,
        audio_num_attention_heads=heads,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=4 * heads,
        num_layers=2,
        caption_channels=6,
        rope_type=rope_type,
    )
    mask = torch.ones(samples, 7)
    mask[-1, 4:] = 0
    inputs = dict(
        hidden_states=numbers(samples, 30, 4),
        audio_hidden_states=numbers(samples, 11, 5),
        encoder_hidden_states=numbers(samples, 7, 6),
        audio_encoder_hidden_states=numbers(samples, 7, 6, seed=1),
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        timestep=torch.arange(30 * samples).view(samples, 30),
        audio_timestep=torch.arange(11 * samples).view(samples, 11),
        num_frames=2,
        height=3,
        width=5,
        audio_num_frames=11,
    )
    return model, inputs


def wan_timesteps() -> Case:
    """Wan 2.2: a timestep for each token, and more tokens than heads than ranks."""
    model, inputs = wan(heads=5)
    return model, inputs | {"timestep": torch.arange(90).view(2, 45)}


def wan_image() -> Case:
    """Wan I2V: 257 tokens of an image before 512 of text, which its code takes for granted."""
    model, inputs = wan(heads=12, samples=1, image_dim=6, added_kv_proj_dim=96)
    inputs |= {
        "encoder_hidden_states": numbers(1, 512, 6),
        "encoder_hidden_states_image": numbers(1, 9, 6),
    }
    return model, inputs


def wan_cube() -> Case:
    """As many heads as channels of a head as tokens of a rank."""
    model, inputs = wan(heads=8, frames=2)
    return model, inputs | {"hidden_states": numbers(2, 4, 2, 4, 8)}


CASES: dict[str, Callable[..., Case]] = {
    "wan": wan,
    "flux": flux,
    "qwen": qwen,
    "qwen with 12 heads": partial(qwen, heads=12),
    "ltx": ltx,
    "hunyuan": partial(hunyuan, heads=5),
    "cogvideox": partial(cogvideox, heads=5),
    "flux2": flux2,
    "chronoedit": chronoedit,
    "helios": helios,
    "minimax": minimax,
    "ltx2": ltx2,
    "ltx2 split": partial(ltx2, heads=5, rope_type="split"),
    "wan timesteps": wan_timesteps,
    "wan image": wan_image,
    "wan cube": wan_cube,
}


def drawn(name: str, **options: Any) -> Case:
    """A model in float64 with random weights, and its inputs."""
    model, inputs = CASES[name](**options)
    draw_weights(model)
    return model.double(), inputs
