# Fetches weights into a folder and ends: see fetch-weights beside this file.
ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS build
# With pip, which weights are fetched with; their checksum stands in the code.
RUN python -m venv /opt/diptych
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY infra/supply/install.py infra/supply/hashes.txt infra/supply/
RUN python infra/supply/install.py --into /opt/diptych/bin/python --part dependencies models
COPY libs/ libs/
RUN python infra/supply/install.py --into /opt/diptych/bin/python --part project

FROM ${PYTHON}
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin diptych
RUN python -m pip uninstall --yes --quiet setuptools wheel pip
COPY --from=build /opt/diptych /opt/diptych
COPY infra/docker/fetch-weights /usr/local/bin/
ENV PATH=/opt/diptych/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache
# A named volume takes its owner from here.
RUN install -d -o diptych -g diptych /cache/diptych/models
USER diptych
ENTRYPOINT ["fetch-weights"]
