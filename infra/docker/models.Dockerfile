# Fetches weights into a folder and ends: see fetch-weights beside this file.
ARG PYTHON=python:3.11-slim-bookworm
FROM ${PYTHON}
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin diptych \
    && python -m venv /opt/diptych
ENV PATH=/opt/diptych/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt ".[models]"
COPY libs/ libs/
RUN pip install --no-cache-dir --no-deps --force-reinstall .
COPY infra/docker/fetch-weights /usr/local/bin/
# A named volume takes its owner from here.
RUN install -d -o diptych -g diptych /cache/diptych/models
WORKDIR /
USER diptych
ENTRYPOINT ["fetch-weights"]
