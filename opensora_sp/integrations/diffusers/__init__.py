"""A pipeline and a scheduler for diffusers, which is imported with this package and not before."""

from opensora_sp.common.importing import check_diffusers

# ruff: noqa: E402  an older version would fail in the imports
check_diffusers()

from .pipeline_folder import write_pipeline
from .pipeline_open_sora import OpenSoraPipeline, OpenSoraPipelineOutput
from .scheduler import OpenSoraScheduler

__all__ = ["OpenSoraPipeline", "OpenSoraPipelineOutput", "OpenSoraScheduler", "write_pipeline"]
