"""Video files, manifests, and which samples each step consumes."""

from .bucket_plan import BucketPlan
from .buckets import Buckets
from .cache import CachedClip, CachedFeatures
from .dataset import BrokenClip, Clip, ClipShape, Sample, VideoTextDataset
from .index import find_files, index_files, read_captions
from .manifest import Entry, Manifest, write_manifest
from .sampler import BatchPlan, MicroBatch, MicroBatchPlan, ReplicaBatches, deal, share
from .toy import ToyClip, is_held_out, toy_clip
from .transforms import resize_and_crop, scale, to_clip, to_frames
from .video import count_frames, read_frames, read_video, write_video

__all__ = [
    "BatchPlan",
    "BrokenClip",
    "BucketPlan",
    "Buckets",
    "CachedClip",
    "CachedFeatures",
    "Clip",
    "ClipShape",
    "Entry",
    "Manifest",
    "MicroBatch",
    "MicroBatchPlan",
    "ReplicaBatches",
    "Sample",
    "ToyClip",
    "VideoTextDataset",
    "count_frames",
    "deal",
    "find_files",
    "index_files",
    "is_held_out",
    "read_captions",
    "read_frames",
    "read_video",
    "resize_and_crop",
    "scale",
    "share",
    "to_clip",
    "to_frames",
    "toy_clip",
    "write_manifest",
    "write_video",
]
