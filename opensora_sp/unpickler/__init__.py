"""Reads the table of a pickled file of weights, in a process that can do nothing else.

Only the standard library is imported here, so that the process starts in milliseconds and holds
nothing worth attacking. ``opensora_sp.checkpoint.pickle_file`` starts it and checks its answer.
"""
