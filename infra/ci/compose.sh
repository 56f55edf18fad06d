#!/usr/bin/env bash
# The compose file on a real engine: the one that runs here, or else one of our own that is gone
# afterwards. Without either only what needs no engine is tested, and the reason is printed.
#   PYTHON=.venv/bin/python infra/ci/compose.sh [pytest's arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

work=$(mktemp -d)
trap 'infra/ci/dockerd.sh stop "$work/engine"; rm -rf "$work"' EXIT
no_engine=""

try() { # says what it said, and keeps its last line as the reason
    "$@" 2>"$work/said" || no_engine=$(tail -n 1 "$work/said")
    cat "$work/said" >&2
    [ -z "$no_engine" ]
}

if docker info >/dev/null 2>&1; then
    echo "compose: on the engine that runs here"
elif echo "compose: starting an engine" && try infra/ci/dockerd.sh start "$work/engine"; then
    export DOCKER_HOST=unix://$work/engine/docker.sock
    export COMPOSE_FILE=docker-compose.yml:infra/ci/compose.yml
    echo "compose: making a base image (the first time takes minutes)"
    try infra/ci/base-image.sh || true
fi

status=0
export DIPTYCH_NO_ENGINE=$no_engine
"$python" -m pytest -q --durations=4 -m compose tests/compose "$@" || status=$?
if [ -n "$no_engine" ]; then
    printf '\n!!! compose: NOT RUN on an engine: %s\n' "$no_engine" >&2
fi
exit "$status"
