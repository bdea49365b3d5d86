#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with the pinned dependencies (requirements/) and megarl itself, editable. Does nothing when that is done.
# Scripts do not call this; they source scripts/env.sh, which does.
#
#   PYTHON=/path/to/python   interpreter to build on (default: python3.11; python3.12 on a CUDA host)
#   MEGARL_DEVICE=cpu|cuda   which requirements (default: those that .venv has; at first, cuda where nvidia-smi works)
#   MEGARL_INSTALL=never     change nothing: fail where something would have to be installed
#   MEGARL_DEV=1             the tools of requirements/dev.txt and docs.txt too; once installed, they stay
#
# .venv may be shared by hosts that see it at other paths, of which some have no GPU: neither changes what is in it.
# pip's own settings (find-links, index-url and cert, from PIP_... or pip.conf) are honoured. All output goes to stderr.
set -euo pipefail
exec >&2
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.8
venv=.venv
stamp=$venv/.megarl-installed
lock=$venv/.megarl-lock # not .lock: that one is uv's own

die() {
  printf 'megarl install: %s\n' "$*"
  exit 1
}

detect_device() {
  if nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi
}

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

# What the installation depends on; equal to the stamp when nothing has to be done. Not the path and not the last part
# of Python's version, which may differ between hosts that share it.
fingerprint() {
  local version
  version=$(version_of "$python")
  cat "${lists[@]}" "$overrides" setup.py scripts/install.sh | sha256sum | cut -d' ' -f1
  echo "$requirements python ${version%.*}${dev:+ dev}"
}

is_done() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; }

# The device whose requirements .venv holds; nothing where there is no finished installation.
installed_device() {
  case $(tail -n 1 "$stamp" 2>/dev/null) in
    requirements/cpu.txt*) echo cpu ;;
    requirements/gpu.txt*) echo cuda ;;
  esac
}

# Value of one of pip's settings, from its environment variable or its files; uv reads neither. Not `pip config get`,
# which overlooks /etc/pip.conf. Several values, which pip separates by newlines, come separated by spaces.
pip_setting() {
  local variable=PIP_${1//-/_} value
  variable=${variable^^}
  value=${!variable:-$("$venv/bin/python" -m pip config list | sed -n "s/^\(install\|global\)\.$1='\(.*\)'$/\2/p" | tail -n 1)}
  echo "${value//\\n/ }"
}

# Arguments that tell uv where packages are; one per line.
package_sources() {
  local place index local_torch=
  index=$(pip_setting index-url)
  [ -z "$index" ] || printf '%s\n' --default-index "$index"
  for place in $(pip_setting find-links); do
    printf '%s\n' --find-links "$place"
    ! compgen -G "${place#file://}/torch-*+cpu-*.whl" >/dev/null || local_torch=1
  done
  [ "$device" = cuda ] || [ -n "$local_torch" ] || printf '%s\n' --torch-backend cpu
}

make_venv() {
  # An installation that did not end (killed, no network) may have left packages half copied.
  local have want
  have=$(version_of "$venv/bin/python" || true)
  want=$(version_of "$python")
  if grep -qsx unfinished "$stamp" || [ "${have%.*}" != "${want%.*}" ] ||
    ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    find "$venv" -mindepth 1 -maxdepth 1 ! -path "$lock" -exec rm -rf {} +
    "$python" -m venv "$venv" || die "'$python -m venv' failed; on Debian and Ubuntu it needs the package python${want%.*}-venv"
  fi
  echo unfinished >"$stamp"
}

install() {
  echo "megarl install: ${lists[*]} into $PWD/$venv (python $(version_of "$python"))"
  make_venv
  local hint="it needs the package index that pip uses; look at the messages above, then run again: it starts afresh"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --retries 2 "uv==$UV_VERSION" ||
    die "could not install uv; $hint"
  local -a sources
  mapfile -t sources < <(package_sources)
  local list certificates
  local -a wanted=()
  for list in "${lists[@]}"; do wanted+=(--requirement "$list"); done
  certificates=$(pip_setting cert)
  [ -z "$certificates" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$certificates}"
  # Compiled now: left to the first import, it is lost where PYTHONDONTWRITEBYTECODE is set, and each process of a run
  # then spends 10 s more on its imports.
  UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180} "$venv/bin/uv" pip install --compile-bytecode --python "$venv/bin/python" \
    "${sources[@]}" "${wanted[@]}" --override "$overrides" --editable . ||
    die "could not install $requirements; $hint"
  fingerprint >"$stamp"
}

installed=$(installed_device)
device=${MEGARL_DEVICE:-${installed:-$(detect_device)}}
case $device in
  cpu) requirements=requirements/cpu.txt overrides=requirements/cpu-overrides.txt python=${PYTHON:-python3.11} ;;
  cuda) requirements=requirements/gpu.txt overrides=requirements/gpu-overrides.txt python=${PYTHON:-python3.12} ;;
  *) die "MEGARL_DEVICE is '$device'; it must be cpu or cuda (unset: found out with nvidia-smi)" ;;
esac
if [ -n "$installed" ]; then
  # It may run on the hosts that it was made on: nothing that this host lacks is a reason to take it away from them.
  [ -n "$(version_of "$venv/bin/python")" ] || die "$PWD/$venv/bin/python does not run on this host, where the" \
    "interpreter that it was built with is missing; put it there, set MEGARL_PYTHON, or remove .venv to install anew"
  # Without PYTHON its own interpreter counts, whatever python3.11 or python3.12 is on this host.
  [ -n "${PYTHON:-}" ] || [ "$device" != "$installed" ] || python=$venv/bin/python
  [ "$device" = cuda ] || [ -n "${MEGARL_DEVICE:-}" ] || ! nvidia-smi -L >/dev/null 2>&1 ||
    echo "megarl install: this host has GPUs, but .venv holds $requirements; MEGARL_DEVICE=cuda installs the others"
fi
# A quickstart beside tests changes nothing: tools that are there stay there.
dev=${MEGARL_DEV:-}
! tail -n 1 "$stamp" 2>/dev/null | grep -q ' dev$' || dev=1
lists=("$requirements" requirements/base.txt requirements/quickstart.txt)
[ -z "$dev" ] || lists+=(requirements/dev.txt requirements/docs.txt)
[ -n "$(version_of "$python")" ] || die "'$python' does not run; install it, or name another one: PYTHON=/path/to/python"

if is_done; then exit 0; fi
[ "${MEGARL_INSTALL:-}" != never ] || die "$PWD/$venv does not hold what $requirements asks for, and this node must not" \
  "change it; run 'bash scripts/install.sh' on one node first, or set MEGARL_PYTHON to an interpreter that has everything"
mkdir -p "$venv"
exec 9>"$lock"
if ! flock --nonblock 9; then
  echo "megarl install: waiting for another installation into $PWD/$venv"
  flock 9
fi
is_done || install
