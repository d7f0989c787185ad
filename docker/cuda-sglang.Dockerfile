# Trainer and SGLang on NVIDIA GPUs, each in an environment of its own. Not built or run yet: see docs/deployment.md.
#   docker build -f docker/cuda-sglang.Dockerfile -t tidegate-cuda .
#   docker run --gpus all --ipc host -v ./model:/model:ro -v runs:/work/runs tidegate-cuda train my.toml --model.path /model
# The toolkit of the base image is for SGLang's kernels that are compiled at the first start. Its version is that of
# torch's CUDA in both environments.
ARG CUDA_IMAGE=nvidia/cuda:13.0.3-devel-ubuntu24.04
# hadolint ignore=DL3006
FROM ${CUDA_IMAGE}
ARG SGLANG_VERSION=0.5.23

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv build-essential libnuma1 \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --no-cache-dir "sglang==${SGLANG_VERSION}"
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY tidegate tidegate
COPY examples examples
RUN python3 -m venv /opt/tidegate \
    && /opt/tidegate/bin/pip install --no-cache-dir '.[train,lora]' && rm -rf /src/build \
    && /opt/sglang/bin/pip freeze > /opt/sglang.txt \
    && grep '^nvidia-nccl' /opt/sglang.txt > /opt/nccl.txt \
    && /opt/tidegate/bin/pip install --no-cache-dir --no-deps -r /opt/nccl.txt \
    && useradd --create-home --uid 1001 tidegate \
    && install -d -o tidegate /work /work/runs

USER 1001
WORKDIR /work
COPY --chown=1001 examples examples
ENV PATH=/opt/tidegate/bin:$PATH
VOLUME /work/runs
ENTRYPOINT ["tidegate"]
# Added to the command: `docker run … train my.toml --engine.kind sglang --engine.python /opt/sglang/bin/python
# --trainer.device cuda`. Without a command, the help.
CMD ["--help"]
