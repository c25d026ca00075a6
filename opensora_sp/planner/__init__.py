"""Estimates of a config's run on a number of GPUs: balance, communication, memory."""

from .batches import BatchSpec, buckets_of
from .run_plan import BatchEstimate, Plan, batch_memory, plan

__all__ = [
    "BatchEstimate",
    "BatchSpec",
    "Plan",
    "batch_memory",
    "buckets_of",
    "plan",
]
