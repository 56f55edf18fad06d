#!/usr/bin/env bash
# Redis and memcached from Debian, for tests/live/test_tier_servers.py. Installs what is missing and
# starts nothing (not with CI_INSTALL=0); where it cannot, says why, and those tests are skipped.
set -euo pipefail

cannot() { printf '\n!!! stores: NOT INSTALLED: %s\n' "$*" >&2; exit 0; }

missing=()
command -v redis-server >/dev/null || command -v valkey-server >/dev/null || missing+=(redis-server)
command -v memcached >/dev/null || missing+=(memcached)
[ ${#missing[@]} -gt 0 ] || exit 0
[ "${CI_INSTALL:-1}" != 0 ] || cannot "${missing[*]}: CI_INSTALL=0"
command -v apt-get >/dev/null || cannot "${missing[*]}: there is no apt-get"
[ "$(id -u)" = 0 ] || cannot "${missing[*]}: apt-get needs root"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt_get() { # RUNLEVEL=1: as if the machine were going down, so no service is started
    RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive timeout 300 apt-get "$@" >>"$log" 2>&1
}
echo "stores: installing ${missing[*]} (CI_INSTALL=0 would not)"
apt_get install -y -qq --no-install-recommends "${missing[@]}" && exit 0
apt_get update -qq || cannot "apt-get update failed: $(tail -n 1 "$log")"
apt_get install -y -qq --no-install-recommends "${missing[@]}" ||
    cannot "apt-get install failed: $(tail -n 1 "$log")"
