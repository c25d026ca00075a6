"""Training: ``run.train`` starts and ends a run, ``trainer`` builds it and has the loop.

Modules are imported by their names, so that one can be used without all others.
"""
