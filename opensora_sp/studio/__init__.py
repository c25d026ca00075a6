"""The studio: a page in the browser that samples from runs of this machine and shows their training.

Only ``page.py`` and ``server.py`` import Gradio, which is an extra.
"""
