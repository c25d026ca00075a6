"""Video files, manifests, and which samples each step consumes."""

from .dataset import BrokenClip, Clip, VideoTextDataset, read_manifest
from .sampler import MicroBatchPlan, ReplicaBatches, check_micro_batches
from .toy import ToyClip, is_held_out, toy_clip
from .video import read_frames, read_video, to_clip, to_frames, write_video

__all__ = [
    "BrokenClip",
    "Clip",
    "MicroBatchPlan",
    "ReplicaBatches",
    "ToyClip",
    "VideoTextDataset",
    "check_micro_batches",
    "is_held_out",
    "read_frames",
    "read_manifest",
    "read_video",
    "to_clip",
    "to_frames",
    "toy_clip",
    "write_video",
]
