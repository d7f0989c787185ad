# The gateway alone, without torch; also the retrieval-free servers and clients: env serve, worker, keys.
#   docker build -f docker/gateway.Dockerfile -t tidegate-gateway .
#   docker run -p 8000:8000 -e TIDEGATE_ADMIN_KEY -v ./model:/model:ro -v journal:/journal tidegate-gateway --model.path /model
FROM python:3.11-slim

WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY tidegate tidegate
COPY examples examples
# The linter takes this folder for a package of an index.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[gateway]' && rm -rf /src/build \
    && useradd --create-home --uid 1000 tidegate \
    && install -d -o tidegate /journal

USER 1000
WORKDIR /home/tidegate
# A named volume gets the owner of this folder.
VOLUME /journal
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tidegate", "gateway", "--gateway.host", "0.0.0.0", "--gateway.port", "8000", "--journal", "/journal"]
