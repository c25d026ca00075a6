"""Video files, manifests, and which samples each step consumes."""

from .bucket_plan import BucketPlan
from .buckets import Buckets
from .cache import CachedClip, CachedFeatures
from .dataset import Clip, ClipShape, CorruptSample, ExtraFiles, Sample, VideoTextDataset
from .index import find_files, index_files
from .limits import Limits
from .loader import RequestLoader, StepLoader
from .manifest import Entry, Manifest, write_manifest
from .sampler import BatchPlan, MicroBatch, MicroBatchPlan, ReadRequest, ReplicaBatches
from .schedule import Assigned, ScheduledBatches
from .toy import toy_clip
from .transforms import scale, to_clip, to_frames
from .video import read_frames, read_video, write_video

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
    "Manifest",
    "MicroBatch",
    "MicroBatchPlan",
    "ReadRequest",
    "ReplicaBatches",
    "RequestLoader",
    "Sample",
    "ScheduledBatches",
    "StepLoader",
    "VideoTextDataset",
    "find_files",
    "index_files",
    "read_frames",
    "read_video",
    "scale",
    "to_clip",
    "to_frames",
    "toy_clip",
    "write_manifest",
    "write_video",
]
