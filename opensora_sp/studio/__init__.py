"""The studio: a page in the browser that samples from a machine's runs and shows their training.

Only ``page*.py`` and ``server.py`` import Gradio, which is an extra.
"""

UPLOADS = ".uploads"  # folder of the outputs for what browsers send
