#!/bin/sh
# Builds the documentation site: sh scripts/build_docs.sh [mkdocs' arguments]; the pages come to build/site.
#
# Its environment, build/docs-env, holds the extra `docs` of pyproject.toml and neither zoo nor torch: the API reference
# is read from the source. It is made anew when pyproject.toml changes.
set -eu

cd "$(dirname "$0")/.."
venv=build/docs-env
stamp=$venv/complete
wanted=$(cksum <pyproject.toml)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    python=$(sh scripts/find_python.sh)
    echo "Making $venv: about 100 MB, a minute."
    "$python" -m venv --clear "$venv"
    "$python" -c '
import tomllib
print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))' >"$venv/extra.txt"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/extra.txt"
    echo "$wanted" >"$stamp"
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict "$@"
echo "Open build/site/index.html"
