# Targets: cpu (the default) and cuda.
#   docker build -t carousel:cpu .
#   docker build -t carousel:cuda --target cuda .
# scripts/prove_image.py runs the install steps of the cpu target without Docker; CI does so at each change.
ARG BASE=python:3.11-slim-bookworm

# What the requirements are read from; a change of the sources leaves the layers with them alone.
FROM ${BASE} AS requirements
WORKDIR /src
# For the operators of the CPU backend; builders only, nothing of it gets into the image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml constraints.txt ./
COPY scripts/make_env.py scripts/

FROM requirements AS builder-cpu
# Further extras of pyproject.toml, by commas: s3,gcs
ARG EXTRAS=""
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target deps --venv /opt/venv --torch cpu --extras "${EXTRAS}"
COPY setup.py README.md LICENSE ./
COPY kernels kernels/
COPY predictor predictor/
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target runtime --venv /opt/venv --torch cpu --extras "${EXTRAS}"

FROM requirements AS builder-cuda
ARG EXTRAS="cuda"
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target deps --venv /opt/venv --torch cuda --extras "${EXTRAS}"
COPY setup.py README.md LICENSE ./
COPY kernels kernels/
COPY predictor predictor/
RUN --mount=type=cache,target=/root/.cache/pip python3 scripts/make_env.py --target runtime --venv /opt/venv --torch cuda --extras "${EXTRAS}"

FROM ${BASE} AS runtime
LABEL org.opencontainers.image.title="Carousel" \
      org.opencontainers.image.description="A KServe predictor for large language models with continuous batching" \
      org.opencontainers.image.licenses="Apache-2.0"
# HOME: with a read-only root, /tmp (an emptyDir) is all that libraries may write to.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    CAROUSEL_HOST=0.0.0.0 \
    CAROUSEL_HTTP_PORT=8080 \
    CAROUSEL_GRPC_PORT=8081 \
    CAROUSEL_CACHE_DIR=/var/cache/carousel
RUN mkdir -p /var/cache/carousel && chown 10001:10001 /var/cache/carousel
WORKDIR /tmp
USER 10001:10001
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
USER 10001:10001

FROM runtime AS cpu
COPY --from=builder-cpu /opt/venv /opt/venv
