"""Counters, timers and checks of sequence parallelism: bytes sent, time waited, inputs compared, parity."""
