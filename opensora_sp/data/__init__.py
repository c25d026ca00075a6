"""Video files, manifests, and which samples each step consumes."""

from .dataset import BrokenClip, Clip, ClipShape, Sample, VideoTextDataset
from .index import find_files, index_files, read_captions
from .manifest import Entry, Manifest, write_manifest
from .sampler import MicroBatchPlan, ReplicaBatches, check_micro_batches
from .toy import ToyClip, is_held_out, toy_clip
from .transforms import resize_and_crop, scale, to_clip, to_frames
from .video import count_frames, read_frames, read_video, write_video

__all__ = [
    "BrokenClip",
    "Clip",
    "ClipShape",
    "Entry",
    "Manifest",
    "MicroBatchPlan",
    "ReplicaBatches",
    "Sample",
    "ToyClip",
    "VideoTextDataset",
    "check_micro_batches",
    "count_frames",
    "find_files",
    "index_files",
    "is_held_out",
    "read_captions",
    "read_frames",
    "read_video",
    "resize_and_crop",
    "scale",
    "to_clip",
    "to_frames",
    "toy_clip",
    "write_manifest",
    "write_video",
]
