# An image for training on NVIDIA GPUs, with vLLM, judges and wandb:
#   docker build -t lit-grpo . && mkdir -p runs
#   docker run --rm --gpus all --ipc=host -e HF_TOKEN -e WANDB_API_KEY \
#     -v "$PWD/runs:/workspace/runs" lit-grpo fit --config gsm8k --config engines/vllm
# Keys and tokens come from the environment of `docker run`; the image has none. Models are cached in
# /home/ubuntu/.cache: mount a folder there to keep them.

# The devel image has the compiler that vLLM and Triton use for kernels at run time. The CUDA version
# must suit the driver and the torch build that pip installs.
ARG CUDA_VERSION=13.0.2
FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# 1000 is the image's user `ubuntu`, and on many hosts the user who mounts a folder here.
RUN python3 -m venv /venv \
    && install --directory --owner 1000 --group 1000 /workspace /workspace/runs
ENV PATH=/venv/bin:$PATH

COPY pyproject.toml MANIFEST.in README.md LICENSE /src/
COPY callbacks /src/callbacks
COPY configs /src/configs
COPY lit_grpo /src/lit_grpo
RUN pip install --no-cache-dir "/src[vllm,judge,wandb]"

USER 1000
WORKDIR /workspace
ENTRYPOINT ["lit-grpo"]
CMD ["--help"]
