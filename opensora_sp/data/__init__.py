"""Video files, manifests, and which samples each step consumes."""

from .bucket_plan import BucketPlan
from .buckets import Buckets
from .cache import CachedClip, CachedFeatures
from .dataset import Clip, ClipShape, CorruptSample, Sample, VideoTextDataset
from .extra_files import ExtraFiles
from .index import find_files, index_files, read_captions
from .limits import Limits
from .loader import LoadedBatch, StepBatches, StepLoader
from .manifest import Entry, Manifest, write_manifest
from .sampler import (
    BatchPlan,
    MicroBatch,
    MicroBatchPlan,
    ReadRequest,
    ReplicaBatches,
    micro_batches_of,
    snake_order,
)
from .schedule import Assigned, ScheduledBatches, busy_seconds
from .toy import ToyClip, is_held_out, toy_clip
from .transforms import resize_and_crop, scale, to_clip, to_frames
from .video import count_frames, read_frames, read_video, write_video

__all__ = [
    "Assigned",
    "BatchPlan",
    "BucketPlan",
    "Buckets",
    "CachedClip",
    "CachedFeatures",
    "Clip",
    "ClipShape",
    "CorruptSample",
    "Entry",
    "ExtraFiles",
    "Limits",
    "LoadedBatch",
    "Manifest",
    "MicroBatch",
    "MicroBatchPlan",
    "ReadRequest",
    "ReplicaBatches",
    "Sample",
    "ScheduledBatches",
    "StepBatches",
    "StepLoader",
    "ToyClip",
    "VideoTextDataset",
    "busy_seconds",
    "count_frames",
    "find_files",
    "index_files",
    "is_held_out",
    "micro_batches_of",
    "read_captions",
    "read_frames",
    "read_video",
    "resize_and_crop",
    "scale",
    "snake_order",
    "to_clip",
    "to_frames",
    "toy_clip",
    "write_manifest",
    "write_video",
]
