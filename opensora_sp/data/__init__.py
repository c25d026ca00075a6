"""Video files, manifests, and which samples each step consumes."""

from .dataset import CorruptSample, VideoTextDataset
from .toy import toy_clip
from .transforms import scale, to_frames

__all__ = ["CorruptSample", "VideoTextDataset", "scale", "to_frames", "toy_clip"]
