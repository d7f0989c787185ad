# Everything on a CPU: trainer, embedded engine, gateway, environments and the examples.
#   docker build -f docker/cpu.Dockerfile -t tidegate .
#   docker run -v runs:/work/runs tidegate                       # the demo, on two cores in minutes
#   docker run -v runs:/work/runs tidegate audit runs/demo
# The default index has the torch build for CUDA. For a smaller image give PyTorch's index for CPUs:
#   docker build --build-arg TORCH_INDEX=URL …
FROM python:3.11-slim
ARG TORCH_INDEX=""

WORKDIR /src
# A layer of its own: it is the largest, and changes rarely.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY tidegate tidegate
COPY examples examples
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[train]' && rm -rf /src/build \
    && useradd --create-home --uid 1000 tidegate \
    && install -d -o tidegate /work /work/runs

USER 1000
WORKDIR /work
COPY --chown=1000 examples examples
COPY --chown=1000 docker/config.toml docker/config.toml
# hadolint ignore=DL3064
ENV OMP_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false
VOLUME /work/runs
ENTRYPOINT ["tidegate"]
CMD ["train", "examples/demo/config.toml", "--fresh"]
