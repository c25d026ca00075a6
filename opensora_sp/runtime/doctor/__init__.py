"""``opensora-sp doctor``: the hosts and devices of a run, checked and compared before the run."""
