# A worker with TensorRT-LLM inside, on the vendor's own image. From the top of the repository:
#   docker build -f infra/docker/tensorrt-llm.Dockerfile --build-arg SERVICE=decode-worker .
# Our worker goes into an environment of its own on top of the vendor's. What TensorRT-LLM is particular
# about (numpy < 2, one version of transformers and what that takes) stays as the vendor has it; if
# the two cannot agree, the build ends and names the package.
ARG TENSORRT_LLM=nvcr.io/nvidia/tensorrt-llm/release:1.2.1

FROM ${TENSORRT_LLM} AS build
ARG SERVICE
ARG KEPT=numpy,torch,transformers,tokenizers,huggingface-hub,pydantic,pydantic-core
# hadolint ignore=DL3002
USER root
RUN case "$SERVICE" in *-worker) ;; *) echo "say which: --build-arg SERVICE=decode-worker" >&2; exit 1 ;; esac
RUN python3 -m venv --without-pip --system-site-packages /opt/diptych
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY infra/supply/install.py infra/supply/hashes.txt infra/supply/
RUN python3 infra/supply/install.py --into /opt/diptych/bin/python --keep "$KEPT" --part dependencies worker-core
COPY libs/ libs/
COPY services/${SERVICE}/ services/${SERVICE}/
RUN python3 infra/supply/install.py --into /opt/diptych/bin/python --part project \
    && printf '#!/bin/sh\nexec python -m diptych_%s "$@"\n' "$(echo "$SERVICE" | tr - _)" \
        >/opt/diptych/bin/serve \
    && chmod +x /opt/diptych/bin/serve

FROM ${TENSORRT_LLM}
USER root
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin diptych
ARG SERVICE
COPY --from=build /opt/diptych /opt/diptych
LABEL org.opencontainers.image.title="diptych ${SERVICE} with TensorRT-LLM"
WORKDIR /
ENV PATH=/opt/diptych/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DIPTYCH_SERVICE=${SERVICE} \
    DIPTYCH_ALL__HEALTH_HOST=0.0.0.0 \
    DIPTYCH_ALL__HEALTH_PORT=8081
USER diptych
EXPOSE 8081
HEALTHCHECK --interval=5s --timeout=5s --start-period=45m --retries=3 \
    CMD exec python -m diptych_chassis.probe "$DIPTYCH_SERVICE"
ENTRYPOINT ["serve"]
