#!/usr/bin/env bash
# The image our Dockerfiles start from, made out of Debian packages where no image registry can be
# reached. The root file system is cached; on failure the last line says why there is no image.
#   DOCKER_HOST=… base-image.sh
set -euo pipefail
here=$(dirname "$(realpath "$0")")

cannot() { printf '%s\n' "$*" >&2; exit 1; }

name=$(sed -n 's/^ARG PYTHON=//p' "$here/../docker/service.Dockerfile")
suite=$(. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME") ||
    cannot "a base image can be made on Debian only"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/diptych-ci
root=$cache/base-$suite.tar
limit_s=600

make_root() {
    if ! command -v mmdebstrap >/dev/null; then
        [ "${CI_INSTALL:-1}" != 0 ] || cannot "mmdebstrap is not installed, and CI_INSTALL=0"
        DEBIAN_FRONTEND=noninteractive timeout 300 \
            apt-get install -y -qq --no-install-recommends mmdebstrap >"$scratch/log" 2>&1 ||
            cannot "mmdebstrap cannot be installed: $(tail -n 1 "$scratch/log")"
    fi
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -f "$sources" ] || sources=/etc/apt/sources.list
    # The packages come from where this machine's own come from.
    timeout "$limit_s" mmdebstrap --variant=minbase \
        --include=python3,python3-pip,python3-venv,ca-certificates \
        --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$scratch/root.tar" "$sources" >"$scratch/log" 2>&1 ||
        cannot "mmdebstrap made no root file system in $limit_s s: $(tail -n 1 "$scratch/log")"
    mv "$scratch/root.tar" "$root"
}

mkdir -p "$cache"
scratch=$(mktemp -d "$cache/.making-XXXXXX") # beside its goal: moving it there is one step
trap 'rm -rf "$scratch"' EXIT

began=$SECONDS
[ -f "$root" ] || make_root
docker import "$root" localhost/rootfs >/dev/null || cannot "docker cannot import $root"
cp "$here/base/Dockerfile" "$scratch"
cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$scratch/ca.crt"
docker build -q --network none -t "$name" "$scratch" >"$scratch/log" 2>&1 ||
    cannot "the base image does not build: $(tail -n 1 "$scratch/log")"
printf 'base image: %s from %s (%d s)\n' "$name" "$root" $((SECONDS - began)) >&2
