# The package in an image: docker build -t opensora-sp . [--build-arg VARIANT=cpu]
#   docker run --gpus all --shm-size 16g -v "$PWD:/project" opensora-sp opensora-sp doctor
# torch's CUDA wheels bring CUDA's libraries, so the host needs a driver and the NVIDIA container toolkit, no more.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

ARG VARIANT=cuda
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Triton and inductor compile with gcc and g++; colossalai run starts ranks of other hosts by ssh.
# Versions are those of the Debian release that the tag names.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ openssh-client \
    && rm -rf /var/lib/apt/lists/*

# First what changes rarely. setup.py bounds the versions of all else.
RUN case "$VARIANT" in \
        cuda) index=https://pypi.org/simple ;; \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        *) echo "got VARIANT=$VARIANT; expected cuda or cpu; change --build-arg" >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --index-url "$index" torch==2.14.1

COPY setup.py pyproject.toml README.md LICENSE /source/
COPY configs /source/configs
COPY opensora_sp /source/opensora_sp
RUN pip install --no-cache-dir '/source[captions,colossalai-runtime,tensorboard,wandb]' \
    && pip install --no-cache-dir --no-deps colossalai==0.5.0 \
    && rm -rf /source \
    && useradd --create-home --uid 1000 user \
    && install --directory --owner user /project

USER 1000
WORKDIR /project
CMD ["opensora-sp", "--help"]
