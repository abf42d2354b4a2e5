#!/bin/sh
# Prints the path of a Python that can make zoo's environment; says on stderr which one it took.
#
# Every candidate is run, not only found: a pyenv shim can be on PATH and refuse to start, and a distribution's
# python3.12 can lack the venv module. ZOO_PYTHON=/path names one by hand. Exit 1 with one sentence if none will do.
set -u

WANTED="Python 3.12 or 3.13" # the range of requires-python in pyproject.toml
PROBE='
import sys, sysconfig
version = ".".join(map(str, sys.version_info[:3]))
ok = (3, 12) <= tuple(sys.version_info[:2]) <= (3, 13)
ok = ok and sys.implementation.name == "cpython" and sys.maxsize > 2**32
ok = ok and not sysconfig.get_config_var("Py_GIL_DISABLED")
try:
    import venv, ensurepip
except ImportError:
    version, ok = version + "-without-venv", False
# In a virtual environment: the Python beneath it, for the environment may be the one to be made anew.
print("%s %s %s" % ("yes" if ok else "no", version, getattr(sys, "_base_executable", None) or sys.executable))
'

# probe FILE: prints "yes|no VERSION PATH", or nothing where FILE does not run.
probe() {
    [ -x "$1" ] && [ ! -d "$1" ] && "$1" -c "$PROBE" 2>/dev/null </dev/null
}

take() {
    rest=${1#* }
    echo "Using Python ${rest%% *} at ${rest#* }" >&2
    printf '%s\n' "${rest#* }"
    exit 0
}

# consider FILE...: takes the first that will do; remembers what else was seen for the sentence at the end.
seen=""
consider() {
    for candidate in "$@"; do
        answer=$(probe "$candidate") || continue
        case $answer in
            yes\ *) take "$answer" ;;
            no\ *) answer=${answer#no }; seen="$seen ${answer%% *}" ;;
        esac
    done
}

# on_path NAME: considers NAME in every folder of PATH, for the first may be a shim that does not start.
on_path() {
    saved_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$saved_ifs
        consider "${folder:-.}/$1"
    done
    IFS=$saved_ifs
}

if [ -n "${ZOO_PYTHON:-}" ]; then
    chosen=$(command -v "$ZOO_PYTHON") || chosen=$ZOO_PYTHON
    answer=$(probe "$chosen") || answer=""
    case $answer in
        yes\ *) take "$answer" ;;
        no\ *) answer=${answer#no }; what="is Python ${answer%% *}" ;;
        *) what="is no Python that runs" ;;
    esac
    echo "ZOO_PYTHON=$ZOO_PYTHON $what; zoo needs $WANTED (64-bit CPython with the venv module): name another one or unset ZOO_PYTHON." >&2
    exit 1
fi

HOME=${HOME:-/nonexistent}
on_path python3.12
on_path python3.13
on_path python3
on_path python
for version in 3.12 3.13; do
    consider "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3
done
if command -v uv >/dev/null 2>&1; then
    found=$(uv python find --no-project '>=3.12,<3.14' 2>/dev/null </dev/null) && consider "$found"
fi
uv_folder=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}
consider "$uv_folder"/cpython-3.12*/bin/python3 "$uv_folder"/cpython-3.13*/bin/python3
for folder in /opt/homebrew/bin /usr/local/bin "${HOMEBREW_PREFIX:-/opt/homebrew}/bin"; do
    consider "$folder/python3.12" "$folder/python3.13"
done
for folder in "${CONDA_PREFIX:-}" "$HOME/miniforge3" "$HOME/miniconda3" "$HOME/anaconda3"; do
    [ -n "$folder" ] && consider "$folder/bin/python3" "$folder"/envs/*/bin/python3
done

# shellcheck disable=SC2086 # one word per version is meant
others=$(printf '%s\n' $seen | sort -u | tr '\n' ' ')
others=${others% }
echo "No $WANTED with the venv module was found on PATH or in pyenv, uv, Homebrew or conda${others:+ (only $others)};" \
    "install one ('uv python install 3.12', 'pyenv install 3.12', or your system's python3.12 and python3.12-venv)," \
    "or name one with ZOO_PYTHON=/path/to/python." >&2
exit 1
