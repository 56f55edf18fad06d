#!/usr/bin/env bash
# A Docker engine of our own, for machines that run none:
#   dockerd.sh start DIR    its socket is then DIR/docker.sock; on failure the last line says why not
#   dockerd.sh stop DIR     ends it with all it ran, and removes DIR
# It touches no firewall rule and no system setting; containers reach each other and published
# ports, and have no way out. Installs Debian's engine if there is none (not with CI_INSTALL=0).
set -euo pipefail

verb=${1:?start or stop} dir=$(realpath -m "${2:?a folder}")
start_s=30 stop_s=30

say() { printf 'dockerd: %s\n' "$*" >&2; }
cannot() { printf '%s\n' "$*" >&2; exit 1; }

install_engine() {
    command -v dockerd >/dev/null && command -v iptables >/dev/null && return
    [ "${CI_INSTALL:-1}" != 0 ] || cannot "no Docker engine is installed, and CI_INSTALL=0"
    command -v apt-get >/dev/null || cannot "no Docker engine is installed, and there is no apt-get"
    say "installing docker.io (CI_INSTALL=0 would not)"
    apt_get update -qq
    apt_get install -y -qq --no-install-recommends docker.io iptables ca-certificates
}

apt_get() {
    for _ in 1 2; do
        DEBIAN_FRONTEND=noninteractive timeout 300 apt-get "$@" >>"$dir/apt.log" 2>&1 && return
    done
    cannot "apt-get $1 failed twice: $(tail -n 1 "$dir/apt.log")"
}

start() {
    [ "$(uname -s)" = Linux ] || cannot "a Docker engine of our own needs Linux"
    [ "$(id -u)" = 0 ] || cannot "a Docker engine of our own needs root, and none is running"
    grep -qw overlay /proc/filesystems || cannot "the kernel has no overlay file system"
    mkdir -p "$dir"
    install_engine
    # A session of its own: Ctrl-C is for the tests; the engine must live to clean up after them.
    setsid dockerd --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/docker.pid" \
        -H "unix://$dir/docker.sock" --iptables=false --ip6tables=false --bridge=none \
        --ip-forward=false >"$dir/dockerd.log" 2>&1 &
    for _ in $(seq $((start_s * 10))); do
        grep -q "API listen" "$dir/dockerd.log" && { say "listens"; return; }
        kill -0 $! 2>/dev/null || cannot "dockerd ended: $(tail -n 1 "$dir/dockerd.log")"
        sleep 0.1
    done
    cannot "dockerd does not listen after $start_s s: $(tail -n 1 "$dir/dockerd.log")"
}

stop() {
    [ -d "$dir" ] || return 0
    ours ps -aq | xargs -r docker -H "unix://$dir/docker.sock" rm -fv >/dev/null || true
    ours network prune -f >/dev/null || true
    [ ! -f "$dir/docker.pid" ] || kill "$(cat "$dir/docker.pid")" 2>/dev/null || true
    for _ in $(seq $((stop_s * 10))); do [ -n "$(left)" ] || break; sleep 0.1; done
    for pid in $(left); do say "kills $pid"; kill -9 "$pid" 2>/dev/null || true; done
    awk -v at="$dir/" 'index($5, at) == 1 { print $5 }' /proc/self/mountinfo |
        sort -r | xargs -r -n 1 umount
    rm -rf --one-file-system "$dir"
}

ours() { timeout 60 docker -H "unix://$dir/docker.sock" "$@" 2>/dev/null; }

left() { # processes of this engine: nobody else knows its folder
    for proc in /proc/[0-9]*; do
        case $(tr '\0' ' ' 2>/dev/null <"$proc/cmdline") in
            dockerd*"$dir/"* | containerd*"$dir/"* | */containerd-shim*"$dir/"*) basename "$proc" ;;
        esac
    done
}

"$verb"
