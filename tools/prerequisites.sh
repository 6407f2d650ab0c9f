#!/usr/bin/env bash
# Names every prerequisite that this machine lacks, with the Debian package that brings it.
#
#   prerequisites.sh build    what `make setup` needs; exit 1 after naming all that is missing
#   prerequisites.sh test     that, and a Chromium, a PostgreSQL, QEMU, Slurm, iproute2, nftables and systemd's
#                             programs, installed by apt-get if we are root and it is there
#   prerequisites.sh python   print the interpreter to make the virtual environment with
#
# PYTHON, CXX, PENSTOCK_CHROMIUM and PENSTOCK_PG_BIN name a program (the last: a folder) in an unusual place;
# PENSTOCK_SBIN the folder of programs that only root's PATH has.
set -u

missing=()
packages=()

lack() { # lack WHAT PACKAGE
    missing+=("$1")
    packages+=("$2")
}

has() { command -v "$1" >/dev/null 2>&1; }

is_new_python() { has "$1" && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if is_new_python "$name"; then
            echo "$name"
            return 0
        fi
    done
    return 1
}

check_python() {
    local python
    if ! python=$(find_python); then
        lack "Python 3.11 or newer (found: $(python3 --version 2>/dev/null || echo none))" python3
        return
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null || lack "Python's venv module, for $python" python3-venv
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())' 2>/dev/null ||
        lack "Python's C headers (Python.h), for $python" python3-dev
}

check_node() {
    local version
    version=$(node --version 2>/dev/null || echo none)
    local major=${version#v}
    major=${major%%.*}
    if [ "$version" = none ] || [ "$major" -lt 20 ]; then
        lack "Node.js 20 or newer (found: $version; Debian 12 brings 18, see nodejs.org for a newer one)" nodejs
    fi
    has npm || lack "npm" npm
}

check_build() {
    check_python
    has "${CXX:-g++}" || has c++ || has clang++ || lack "a C++20 compiler" g++
    has make || lack "GNU make" make
    check_node
}

has_chromium() {
    local name
    for name in ${PENSTOCK_CHROMIUM:-chromium chromium-browser google-chrome}; do
        has "$name" && return 0
    done
    return 1
}

has_postgresql() {
    [ -n "${PENSTOCK_PG_BIN:-}" ] && [ -x "$PENSTOCK_PG_BIN/initdb" ] && return 0
    has initdb && return 0
    compgen -G "${PENSTOCK_PG_ROOT:-/usr/lib/postgresql}/*/bin/initdb" >/dev/null
}

has_emulator() { # of a machine that tools/emulate.py has models for; HOSTTYPE is bash's name of the machine
    case "$HOSTTYPE" in
    x86_64 | aarch64) has "qemu-$HOSTTYPE" || has "qemu-$HOSTTYPE-static" ;;
    esac
}

has_system() { # has_system PROGRAM: also where only root's PATH leads
    has "$1" || [ -x "${PENSTOCK_SBIN:-/usr/sbin}/$1" ]
}

check_test() {
    has_chromium || lack "Chromium, for the tests of the page" chromium
    has_postgresql || lack "PostgreSQL, for the tests of the server" postgresql
    has_system slurmctld || lack "Slurm's controller, for the tests of pilots on Slurm" slurmctld
    has_system slurmd || lack "Slurm's node daemon, for the same" slurmd
    has sbatch || lack "Slurm's commands, for the same" slurm-client
    has_system munged || lack "munge, for the same" munge
    has_system ip || lack "iproute2, for the tests on several hosts" iproute2
    has_system nft || lack "nftables, for the same" nftables
    has systemd-analyze || lack "systemd's checks of units, for the tests of deploy/systemd" systemd
    has_emulator || lack "QEMU's user-mode emulator, for the tests on older processors" qemu-user
}

report() { # report: 0 if nothing is missing, else 1 and the list
    [ ${#missing[@]} -eq 0 ] && return 0
    local i
    echo "Penstock needs what this machine lacks:" >&2
    for i in "${!missing[@]}"; do
        printf '  - %s  (Debian package: %s)\n' "${missing[$i]}" "${packages[$i]}" >&2
    done
    echo "On Debian or Ubuntu:  sudo apt-get install ${packages[*]}" >&2
    return 1
}

install_test_packages() {
    [ ${#packages[@]} -gt 0 ] && [ "$(id -u)" -eq 0 ] && has apt-get || return 0
    echo "==> installing ${packages[*]} with apt-get"
    DEBIAN_FRONTEND=noninteractive apt-get update -q </dev/null &&
        DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${packages[@]}" </dev/null
    missing=()
    packages=()
    check_test
}

case "${1:-}" in
python) find_python ;;
build)
    check_build
    report
    ;;
test)
    check_test
    install_test_packages
    check_build
    report
    ;;
*)
    echo "usage: $0 build|test|python" >&2
    exit 2
    ;;
esac
