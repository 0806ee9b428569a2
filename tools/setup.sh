# Functions that tools/quickstart and tools/test share; sourced by bash, not run.
# shellcheck shell=bash

# The repository, whatever folder the caller is in.
REPO=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$REPO/.venv
# Nothing owned by root beside the user's source files.
export PYTHONDONTWRITEBYTECODE=1

ME=${ME:-$(basename -- "$0")}

say() { printf '%s: %s\n' "$ME" "$*"; }

die() {
  printf '%s: error: %s\n' "$ME" "$1" >&2
  exit "${2:-1}"
}

# free_name PATH: PATH, or with a number behind it, so that nothing is there but the rest of
# a run that failed.
free_name() {
  local path=$1 n=2
  while [ -e "$path" ] && [ ! -e "$path/.failed" ]; do
    path=$1.$n
    n=$((n + 1))
  done
  printf '%s\n' "$path"
}

need_root() {
  [ "$(id -u)" -eq 0 ] || die "uprobes need root; run: sudo $0 $*" 3
}

# Runs a command up to three times, silent unless it fails for good.
retry() {
  local log try
  log=$(mktemp)
  for try in 1 2 3; do
    if "$@" </dev/null >"$log" 2>&1; then
      rm -f "$log"
      return 0
    fi
    sleep $((try * 3))
  done
  tail -n 20 "$log" >&2
  rm -f "$log"
  return 1
}

missing_packages() {
  local package
  for package in "$@"; do
    # shellcheck disable=SC2016 # the format is dpkg-query's own
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      printf '%s\n' "$package"
  done
}

# install_packages PACKAGE...: from the distribution, only what is missing.
install_packages() {
  local missing=()
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian or Ubuntu: expecting BCC's Python module, venv and gcc to be there"
    return 0
  fi
  mapfile -t missing < <(missing_packages "$@")
  if [ ${#missing[@]} -eq 0 ]; then
    say "system packages: all there ($*)"
    return 0
  fi
  if [ "${NO_INSTALL:-0}" = 1 ]; then
    die "these packages are missing and --no-install was given: ${missing[*]}"
  fi
  say "system packages: installing ${missing[*]} with apt-get"
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -y
    -o Acquire::Retries=5 -o DPkg::Lock::Timeout=180)
  retry "${apt[@]}" update || die "apt-get update failed (see above): is the network there?"
  retry "${apt[@]}" install --no-install-recommends "${missing[@]}" ||
    die "apt-get could not install: ${missing[*]}"
}

# Fingerprint of everything that decides what is in the environment.
environment_stamp() {
  {
    printf 'extras=%s\nroot=%s\n' "$1" "$REPO"
    /usr/bin/python3 --version
    cat -- "$REPO/pyproject.toml"
  } | sha256sum | cut -d' ' -f1
}

# make_environment EXTRAS: .venv with nccluprobe in it, editable; EXTRAS like "[test]" or "".
make_environment() {
  local extras=$1 stamp has
  [ -x /usr/bin/python3 ] || die "there is no /usr/bin/python3"
  /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "/usr/bin/python3 is older than 3.10"
  stamp=$(environment_stamp "$extras")
  # The test extras contain everything that a plain installation has.
  has=$(cat -- "$VENV/.nccluprobe-stamp" 2>/dev/null || true)
  if [ -x "$VENV/bin/nccluprobe" ] && "$VENV/bin/python" -c 'import bcc, nccluprobe' 2>/dev/null; then
    if [ "$has" = "$stamp" ] || [ "$has" = "$(environment_stamp '[test]')" ]; then
      say "environment: $VENV is up to date"
      return 0
    fi
  fi
  if [ "${NO_INSTALL:-0}" = 1 ]; then
    die "$VENV is missing or out of date and --no-install was given"
  fi
  if ! "$VENV/bin/python" -c 'import pip, bcc' 2>/dev/null; then
    say "environment: making $VENV (sees the distribution's packages, for BCC)"
    rm -rf -- "$VENV"
    retry /usr/bin/python3 -m venv --system-site-packages "$VENV" ||
      die "the environment could not be made: is python3-venv installed?"
    "$VENV/bin/python" -c 'import bcc' ||
      die "BCC's Python module cannot be imported: is python3-bpfcc installed?" 5
  fi
  say "environment: installing this checkout${extras:+ with $extras} into it with pip"
  rm -f -- "$VENV/.nccluprobe-stamp"
  retry "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --root-user-action=ignore --retries 10 --timeout 60 --editable "$REPO$extras" ||
    die "pip could not install nccluprobe (see above): is the network there?"
  printf '%s\n' "$stamp" >"$VENV/.nccluprobe-stamp"
}

# What was made under sudo belongs to the user who called it.
give_to_user() {
  local path
  [ -n "${SUDO_UID:-}" ] && [ "$(stat -c %u -- "$REPO")" = "$SUDO_UID" ] || return 0
  for path in "$@"; do
    [ ! -e "$path" ] || chown -R --no-dereference "$SUDO_UID:${SUDO_GID:-$SUDO_UID}" "$path"
  done
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
  local until=$((SECONDS + $1))
  shift
  while ! "$@"; do
    [ "$SECONDS" -lt "$until" ] || return 1
    sleep 0.2
  done
}

# stop PID [SECONDS]: SIGTERM (a script's background jobs ignore SIGINT), then
# SIGKILL; waits for a child of this shell.
stop() {
  local pid=$1 until=$((SECONDS + ${2:-60}))
  kill -TERM "$pid" 2>/dev/null || true
  while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$until" ]; do sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}
