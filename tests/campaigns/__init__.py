"""Campaigns: many faults of one kind, drawn by a seed, against one guarantee (tests/README.md)."""
