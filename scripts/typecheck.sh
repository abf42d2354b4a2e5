#!/bin/sh
# Runs mypy over zoo as users import it: sh scripts/typecheck.sh [PYTHON=python3] [mypy's arguments]
#
# mypy reads folders, not the import hooks of an editable install, and so sees neither zoo.models nor zoo.bridges. A
# folder of links gives it that layout; the paths it prints are turned back into those of the repository.
set -eu

cd "$(dirname "$0")/.."
python=${1:-python3}
[ $# -eq 0 ] || shift
view=.typecheck
rm -rf "$view/zoo"
mkdir -p "$view/zoo"
ln -sfn ../benchmarks "$view/benchmarks"
for entry in zoo/* models bridges recipes; do
    case $entry in *__pycache__) continue ;; esac
    ln -s "../../$entry" "$view/zoo/$(basename "$entry")"
done

status=0
output=$(MYPYPATH=$view "$python" -m mypy -p zoo -p benchmarks "$@" 2>&1) || status=$?
printf '%s\n' "$output" | sed -E "s#^$view/zoo/(models|bridges|recipes)/#\1/#; s#^$view/##"
exit $status
