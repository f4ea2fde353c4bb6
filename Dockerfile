# Targets: cpu (the default), demo (cpu with the demo model inside, for machines without a network) and cuda.
#   docker build -t carousel:cpu .
#   docker build -t carousel:demo --target demo .
#   docker build -t carousel:cuda --target cuda .
# scripts/prove_image.py runs the install steps of the cpu target without Docker; CI does so at each change.
ARG BASE=python:3.11-slim-bookworm

# What the requirements are read from; a change of the sources leaves the layers with them alone.
FROM ${BASE} AS requirements
WORKDIR /src
# For the operators of the CPU backend; builders only, nothing of it gets into the image. The list of packages is taken
# before, for the bill of materials.
# hadolint ignore=DL3008
RUN apt-get update \
    && cp /var/lib/dpkg/status /var/lib/dpkg/status.base \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt ./
COPY scripts/make_env.py scripts/

FROM requirements AS builder-cpu
# Further extras of pyproject.toml, by commas: s3,gcs
ARG EXTRAS=""
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target deps --venv /opt/venv --torch cpu --extras "${EXTRAS}"
COPY scripts/slim_env.py scripts/sbom.py scripts/
RUN python3 scripts/slim_env.py /opt/venv
COPY setup.py README.md LICENSE ./
COPY kernels kernels/
COPY predictor predictor/
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target runtime --venv /opt/venv --torch cpu --extras "${EXTRAS}"
RUN python3 scripts/sbom.py --venv /opt/venv --dpkg /var/lib/dpkg/status.base --out /opt/venv/share/sbom

FROM requirements AS builder-cuda
ARG EXTRAS="cuda"
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target deps --venv /opt/venv --torch cuda --extras "${EXTRAS}"
COPY scripts/slim_env.py scripts/sbom.py scripts/
RUN python3 scripts/slim_env.py --keep headers /opt/venv
COPY setup.py README.md LICENSE ./
COPY kernels kernels/
COPY predictor predictor/
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target runtime --venv /opt/venv --torch cuda --extras "${EXTRAS}"
RUN python3 scripts/sbom.py --venv /opt/venv --dpkg /var/lib/dpkg/status --out /opt/venv/share/sbom

FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Carousel" \
      org.opencontainers.image.description="A KServe predictor for large language models with continuous batching" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="docker.io/library/python:3.11-slim-bookworm"
# HOME: with a read-only root, /tmp (an emptyDir) is all that libraries may write to.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    HF_HOME=/tmp/huggingface \
    TRITON_CACHE_DIR=/tmp/triton \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    CAROUSEL_HOST=0.0.0.0 \
    CAROUSEL_HTTP_PORT=8080 \
    CAROUSEL_GRPC_PORT=8081 \
    CAROUSEL_CACHE_DIR=/var/cache/carousel
RUN mkdir -p /var/cache/carousel && chown 1000:1000 /var/cache/carousel
WORKDIR /tmp
USER 1000:1000
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
ENTRYPOINT ["carousel", "serve"]

FROM runtime AS cuda
# Triton compiles a launcher for each kernel, with the system's C compiler.
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=builder-cuda /opt/venv /opt/venv
USER 1000:1000

FROM runtime AS serving
COPY --from=builder-cpu /opt/venv /opt/venv

# The model lies where the default setting looks for it, so that nothing is fetched at the start.
FROM builder-cpu AS model
RUN --mount=type=cache,target=/root/.cache/pip /opt/venv/bin/carousel pull --cache-dir /var/cache/carousel

FROM serving AS demo
COPY --from=model --chown=1000:1000 /var/cache/carousel /var/cache/carousel

FROM serving AS cpu
