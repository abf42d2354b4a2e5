#!/bin/sh
# Makes or renews the environment: sh scripts/setup_env.sh [FOLDER=.venv] [EXTRAS=dev] [RESOLUTION=tested]
#
# RESOLUTION says which versions of the dependencies: `tested` those of constraints.txt, `lowest` the lower bounds of
# pyproject.toml, `newest` the newest that its ranges allow.
#
# A stamp inside the folder holds a checksum of what the environment was made from (pyproject.toml, setup.py, versions,
# extras, where it stands). It is written last and taken away first, so an interrupted install is never taken for
# a complete one; with a stamp that fits there is nothing to do.
set -eu

cd "$(dirname "$0")/.."
venv=${1:-.venv}
extras=${2:-dev}
resolution=${3:-tested}
case $resolution in
    tested | lowest | newest) ;;
    *)
        echo "RESOLUTION=$resolution is none of tested, lowest, newest." >&2
        exit 1
        ;;
esac
case $venv in
    /*) full=$venv ;;
    *) full=$(pwd -P)/$venv ;;
esac
stamp=$venv/.zoo-complete   # checksum of what the environment was made from
begun=$venv.zoo-unfinished  # beside the folder: an install has started, by the process named in it, and not ended
wanted=$({ cat pyproject.toml setup.py constraints.txt; echo "$extras $full $resolution"; } | cksum)

# runs_as PYTHON: the environment's Python runs, and is (a virtual environment of) PYTHON.
runs_as() {
    "$venv/bin/python" -c '
import os, sys
sys.exit(os.path.realpath(sys._base_executable) != os.path.realpath(sys.argv[1]))' "$1" 2>/dev/null
}

is_whole() {
    [ ! -e "$begun" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null
}

python=""
if [ -z "${ZOO_PYTHON:-}" ]; then
    if is_whole; then exit 0; fi
else
    python=$(sh scripts/find_python.sh)
fi
maker=$(cat "$begun" 2>/dev/null) || maker=""
if [ -n "$maker" ] && ps -p "$maker" -o args= 2>/dev/null | grep -q setup_env; then
    echo "Process $maker is making $venv right now: wait until it is done, then run this again." >&2
    exit 1
fi

anew=yes
if [ ! -e "$venv" ]; then
    :
elif [ -e "$begun" ]; then
    echo "The last install into $venv did not finish: making it anew."
elif [ -n "$python" ] && ! runs_as "$python"; then
    echo "$venv has another Python than ZOO_PYTHON: making it anew."
elif ! ZOO_PYTHON=$venv/bin/python sh scripts/find_python.sh >/dev/null 2>&1; then
    echo "$venv holds no Python that zoo can use: making it anew."
elif ! head -n 2 "$venv/bin/pip" 2>/dev/null | grep -qF "$full/"; then
    echo "$venv was made in another folder, or without pip: making it anew."
elif is_whole; then
    exit 0
else
    anew=no
    echo "Updating $venv, which was made from another pyproject.toml or for other extras."
fi

if [ "$anew" = yes ]; then
    [ -n "$python" ] || python=$(sh scripts/find_python.sh)
    echo "Making $venv: about 5 GB, a few minutes."
    echo $$ >"$begun"
    "$python" -m venv --clear "$venv"
fi
echo $$ >"$begun"
rm -f "$stamp"

pip_install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

echo "Installing zoo[$extras], $resolution versions ..."
case $resolution in
    tested) pip_install --constraint constraints.txt --editable ".[$extras]" ;;
    lowest)
        "$venv/bin/python" scripts/lowest.py >"$venv/lowest.txt"
        pip_install --constraint "$venv/lowest.txt" --editable ".[$extras]"
        ;;
    newest) # uv finds them in seconds, where pip tries versions for minutes, and loads several wheels at once
        pip_install uv
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --upgrade --editable ".[$extras]"
        ;;
esac
echo "$wanted" >"$stamp"
rm -f "$begun"
echo "Ready: $venv"
