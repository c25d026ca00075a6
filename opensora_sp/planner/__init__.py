"""Estimates of a config's run on a number of GPUs: memory, communication, seconds."""

from .batches import BatchSpec, buckets_of
from .run_plan import BatchEstimate, Plan, plan

__all__ = ["BatchEstimate", "BatchSpec", "Plan", "buckets_of", "plan"]
