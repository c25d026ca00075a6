"""Tools of sequence parallelism: communication counter and time, check of inputs, parity."""
