"""The processes of a run: launch environment, host checks, rendezvous, and the watchdog."""
