"""Estimates of a config's run on a number of GPUs: balance, communication, memory."""

from .batches import BatchSpec, buckets_of
from .run_plan import BatchEstimate, Plan, batch_memory, plan

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
    "plan",
]
