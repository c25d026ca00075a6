"""Noise of a step's gradient: steps of nearly one bucket against steps with the mix of the set.

python -m benchmarks gradient_noise

Takes about five minutes on one core.

A small STDiT3 is trained on toy clips in three buckets (images, short and long videos), in each
order, from the same weights and with the same number of clips in each step. Once the clips of all
buckets look alike, and once images are inverted and long videos are grey, under the same captions.

On the way, at fixed weights of the run in random order, the gradients of all steps of an epoch are
compared with their mean. "noise" is ``|g - mean|^2 / |mean|^2``, the mean over steps. Both orders
have the same micro-batches, and each clip has the same noise and timestep in both, so only the
order differs. By random cuts of the micro-batches into steps, the spread of mixed steps is known.
"between buckets" is the part that more clips in a step do not reduce where it has one bucket:
the distance of the buckets' gradients to the mean, estimated without bias from products of
different micro-batches.

Losses are those of held-out clips of each bucket: the mean over the last epochs, and by how much it
varies from one epoch to the next.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opensora_sp.data.bucket_plan import BatchOrder, BucketPlan
from opensora_sp.data.randomness import normal, uniform
from opensora_sp.data.sampler import MicroBatch
from opensora_sp.data.toy import toy_clip
from opensora_sp.data.transforms import scale
from opensora_sp.diffusion import RectifiedFlow
from opensora_sp.diffusion.process import Noised
from opensora_sp.encoders.standins import HashedBagOfWords, PatchPoolVAE
from opensora_sp.models import build_model

FRAMES, OF_BUCKET, HELD_OUT = (1, 4, 8), 96, 16
BATCH_SIZE, PER_STEP = 4, 4
SIDE, POOL, FPS = 192, (1, 16, 16), 8.0
MODEL: dict[str, Any] = dict(
    in_channels=3,
    caption_channels=32,
    model_max_length=24,
    hidden_size=96,
    depth=2,
    num_heads=4,
    input_sq_size=SIDE,
    pred_sigma=False,
    class_dropout_prob=0.0,
)
ORDERS: tuple[BatchOrder, ...] = ("by_cost", "mixed")
CUTS, LAST_EPOCHS, HELD_OUT_DRAWS = 200, 3, 10_000


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 3, 8], help="epochs of the noise")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each order")


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {
        title: compare_orders(title, Clips(differ), args)
        for title, differ in (("buckets look alike", False), ("buckets look different", True))
    }


def compare_orders(title: str, clips: Clips, args: argparse.Namespace) -> dict[str, Any]:
    """Train in both orders and report; returns the figures."""
    print(f"\n{title}: {len(clips)} clips, {BATCH_SIZE * PER_STEP} in a step")
    noise = {}
    losses: dict[str, list[list[float]]] = {order: [] for order in ORDERS}
    for seed in range(args.seeds):
        for order in ORDERS:
            training = Training(clips, order, seed)
            held_out = []
            for epoch in range(args.epochs):
                training.epoch(epoch)
                if epoch >= args.epochs - LAST_EPOCHS:
                    held_out.append(training.held_out_losses())
                if order == "mixed" and seed == 0 and epoch + 1 in args.at:
                    noise[epoch + 1] = training.noise(epoch)
                    report_noise(epoch + 1, noise[epoch + 1])
            losses[order].append(np.mean(held_out, axis=0).tolist())
            report_losses(f"{order}, seed {seed}", held_out)
    return {"noise": noise, "losses": losses}


def report_noise(epoch: int, noise: dict[str, float]) -> None:
    values = ", ".join(f"{name} {value:.2f}" for name, value in noise.items())
    print(f"noise after {epoch} epochs: {values}", flush=True)


def report_losses(title: str, held_out: Sequence[Sequence[float]]) -> None:
    means, changes = np.mean(held_out, axis=0), np.std(held_out, axis=0)
    buckets = ", ".join(
        f"{frames} frames {mean:.4f} +- {change:.4f}"
        for frames, mean, change in zip(FRAMES, means, changes, strict=True)
    )
    print(f"{title}: held-out loss {means.mean():.4f}; {buckets}", flush=True)


class Clips:
    """Latents and captions of all clips, training first; the columns are those of a manifest."""

    file = "toy clips"

    def __init__(self, differ: bool) -> None:
        vae, text = PatchPoolVAE(POOL), HashedBagOfWords(32, 24)
        self.frames = np.repeat(FRAMES, OF_BUCKET)
        frames = [*self.frames.tolist(), *np.repeat(FRAMES, HELD_OUT).tolist()]
        self.latents, captions = [], []
        for index, length in enumerate(frames):
            clip = toy_clip(0, index)
            video = torch.from_numpy(clip.draw(length, SIDE)).permute(3, 0, 1, 2)
            if differ and length == FRAMES[0]:
                video = 255 - video
            if differ and length == FRAMES[-1]:
                video = video.float().mean(dim=0, keepdim=True).repeat(3, 1, 1, 1)
            self.latents.append(vae.encode(scale(video)[None])[0])
            captions.append(clip.caption)
        self.y, self.mask = text.encode(captions)

    def __len__(self) -> int:
        return len(self.frames)

    def column(self, name: str) -> np.ndarray:
        # A bucket's videos are longer than its clips.
        longer = self.frames + (self.frames > 1)
        columns = {"num_frames": longer, "height": SIDE, "width": SIDE}
        return np.broadcast_to(np.asarray(columns[name], dtype=float), self.frames.shape)

    def held_out(self, bucket: int) -> range:
        first = len(self) + bucket * HELD_OUT
        return range(first, first + HELD_OUT)


class Training:
    """A model that is trained in one order."""

    def __init__(self, clips: Clips, order: BatchOrder, seed: int) -> None:
        self.clips, self.order, self.seed = clips, order, seed
        self.flow = RectifiedFlow(use_timestep_transform=False)
        torch.manual_seed(seed)
        self.model = build_model("STDiT3", **MODEL)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=0.0)
        self.plan = self.plan_of(order)

    def plan_of(self, order: BatchOrder) -> BucketPlan:
        rows: Any = self.clips
        return BucketPlan(
            rows,
            {"144p": dict.fromkeys(FRAMES, (1.0, BATCH_SIZE))},
            frame_interval=1,
            micro_batches_per_step=PER_STEP,
            seed=self.seed,
            cost=lambda shape, clips: float(shape.num_frames * clips),
            batch_order=order,
        )

    def losses(self, ids: Sequence[int], draw: int) -> Tensor:
        """Of each clip, with the noise and the timestep of a draw."""
        x = torch.stack([self.clips.latents[one] for one in ids])
        noise = torch.stack([normal(tuple(x.shape[1:]), 0, "noise", one, draw) for one in ids])
        t = torch.tensor([1000 * uniform(0, "timestep", one, draw) for one in ids])
        noised = Noised.of(self.flow, x, noise, t, None)
        sizes = torch.full((len(ids),), float(SIDE))
        fps = torch.full((len(ids),), FPS)
        places = list(ids)
        y, mask = self.clips.y[places], self.clips.mask[places]
        output = self.model(noised.x_t, t, y, mask, fps=fps, height=sizes, width=sizes)
        return self.flow.losses(output, noised)

    def steps(self, order: BatchOrder, epoch: int) -> list[list[MicroBatch]]:
        plan = self.plan if order == self.order else self.plan_of(order)
        length = int(plan.steps_per_epoch)
        return [plan.step(step) for step in range(epoch * length, (epoch + 1) * length)]

    def epoch(self, epoch: int) -> None:
        for step in self.steps(self.order, epoch):
            for one in step:
                (self.losses(one.ids, epoch).mean() / len(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def noise(self, epoch: int) -> dict[str, float]:
        """At the weights at hand, of each order."""
        places: dict[tuple[int, ...], int] = {}
        gradients, buckets = [], []
        for step in self.steps("mixed", epoch):
            for one in step:
                places[one.ids] = len(places)
                loss = self.losses(one.ids, epoch).mean()
                of_weights = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
                buckets.append(one.bucket)
                gradients.append(torch.cat([gradient.flatten() for gradient in of_weights]))
        products = _products(gradients)

        by_cost = [[places[one.ids] for one in step] for step in self.steps("by_cost", epoch)]
        draws = np.random.default_rng(0)
        of_cuts = []
        for _ in range(CUTS):
            cut = draws.permutation(len(places)).reshape(-1, PER_STEP)
            of_cuts.append(noise_of(products, cut))
        return {
            "by_cost": noise_of(products, np.array(by_cost)),
            "mixed": float(np.mean(of_cuts)),
            "spread of mixed": float(np.std(of_cuts)),
            "between buckets": between_buckets(products, np.array(buckets)),
        }

    @torch.no_grad()
    def held_out_losses(self) -> list[float]:
        """Of each bucket, over several draws of noise and timesteps."""
        return [
            torch.stack([self.losses(self.clips.held_out(n), HELD_OUT_DRAWS + k) for k in range(4)])
            .mean()
            .item()
            for n in range(len(FRAMES))
        ]


def _products(gradients: Sequence[Tensor]) -> np.ndarray:
    """The products of all pairs of gradients, float64 ``[M, M]``."""
    stacked = torch.stack(list(gradients)).double()
    products: np.ndarray = (stacked @ stacked.T).numpy()
    return products


def noise_of(products: np.ndarray, steps: np.ndarray) -> float:
    """The mean over steps of the squared distance to the mean gradient, over its square.

    Args:
        products: of the gradients of micro-batches, ``[M, M]``.
        steps: the micro-batches of each step, ``[steps, PER_STEP]``.
    """
    square = products[steps[:, :, None], steps[:, None, :]].mean(axis=(1, 2)).mean()
    of_mean = products[np.ix_(steps.ravel(), steps.ravel())].mean()
    # The mean square of what differs from a mean is the mean square less that of the mean.
    return float((square - of_mean) / of_mean)


def between_buckets(products: np.ndarray, buckets: np.ndarray) -> float:
    """The mean squared distance of the buckets' gradients to their mean, over its square.

    Buckets have equally many micro-batches. A micro-batch is not multiplied with itself, so noise
    within a bucket adds nothing.

    Args:
        products: of the gradients of micro-batches, ``[M, M]``.
        buckets: of the micro-batches, ``[M]``.
    """
    names = np.unique(buckets)
    pairs = np.empty((len(names), len(names)))
    for row, one in enumerate(names):
        for column, other in enumerate(names):
            block = products[np.ix_(buckets == one, buckets == other)]
            if row == column:
                block = block[~np.eye(len(block), dtype=bool)]
            pairs[row, column] = block.mean()
    return float((np.diag(pairs).mean() - pairs.mean()) / pairs.mean())
