"""What a config will do on some number of GPUs, before any is used: who holds what, what is sent, what fits."""

from .plan import Bucket, BucketPlan, Plan, buckets_of, plan

__all__ = ["Bucket", "BucketPlan", "Plan", "buckets_of", "plan"]
