# One service: its own code, the libraries, and its own dependencies. From the top of the repository:
#   docker build -f infra/docker/service.Dockerfile --build-arg SERVICE=gateway .
# A worker in front of an engine of another maker takes clients too: --build-arg EXTRAS=engines
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
ARG SERVICE
ARG EXTRAS=""
RUN test -n "$SERVICE" || { echo "say which: --build-arg SERVICE=gateway" >&2; exit 1; }
RUN python -m venv --without-pip /opt/diptych
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1
# Dependencies first, from the list alone: a change of the code does not fetch them again.
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY infra/supply/install.py infra/supply/hashes.txt infra/supply/
RUN python infra/supply/install.py --into /opt/diptych/bin/python --part dependencies "$SERVICE" $EXTRAS
COPY libs/ libs/
COPY services/${SERVICE}/ services/${SERVICE}/
RUN python infra/supply/install.py --into /opt/diptych/bin/python --part project \
    && printf '#!/bin/sh\nexec python -m diptych_%s "$@"\n' "$(echo "$SERVICE" | tr - _)" \
        >/opt/diptych/bin/serve \
    && chmod +x /opt/diptych/bin/serve

FROM ${PYTHON}
# A fixed id: workers share memory only with workers of the same user.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin diptych
ARG SERVICE
# What llama.cpp links to and a slim image lacks.
RUN case "$SERVICE" in *-worker) \
        apt-get update -qq \
        && apt-get install -y -qq --no-install-recommends libgomp1 \
        && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin ;; \
    esac
# Nothing is installed in a container, so nothing that installs is in it.
RUN python -m pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/diptych /opt/diptych
LABEL org.opencontainers.image.title="diptych ${SERVICE}" org.opencontainers.image.licenses=Apache-2.0
ENV PATH=/opt/diptych/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DIPTYCH_SERVICE=${SERVICE} \
    DIPTYCH_ALL__HEALTH_HOST=0.0.0.0 \
    DIPTYCH_ALL__HEALTH_PORT=8081
USER diptych
EXPOSE 8081
HEALTHCHECK --interval=3s --timeout=3s --start-period=2m --retries=3 \
    CMD exec python -m diptych_chassis.probe "$DIPTYCH_SERVICE"
ENTRYPOINT ["serve"]
