"""Estimates of a config's run on a number of GPUs: balance, communication, memory."""

from .run_plan import (
    BatchEstimate,
    BatchSpec,
    Plan,
    batch_memory,
    buckets_of,
    checkpoint_levels,
    plan,
)

# The names of 0.x, until 1.0.
Bucket = BatchSpec
BucketPlan = BatchEstimate

__all__ = [
    "BatchEstimate",
    "BatchSpec",
    "Bucket",
    "BucketPlan",
    "Plan",
    "batch_memory",
    "buckets_of",
    "checkpoint_levels",
    "plan",
]
