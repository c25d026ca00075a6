"""The definition of each kernel in plain torch."""
