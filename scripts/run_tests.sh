#!/bin/sh
# Runs the tests: sh scripts/run_tests.sh PYTHON WORKERS [arguments of pytest]
#
# Whole files go to a worker. Tests that start ranks or commands of their own run two files at a time. What fails beside
# other tests is run once more, alone: these tests wait for processes and signals, and a full machine can be too slow.
set -u
python=$1
workers=$2
shift 2

run() {
    count=$1
    folders=$2
    shift 2
    # shellcheck disable=SC2086  # several folders
    "$python" -m pytest -n "$count" --dist loadfile --no-loadscope-reorder $folders "$@"
    code=$?
    if [ "$code" = 1 ]; then
        echo "Once more, alone, what failed:"
        "$python" -m pytest --last-failed --last-failed-no-failures none $folders "$@"
        code=$?
    fi
    [ "$code" = 0 ] || [ "$code" = 5 ] || status=$code # 5: no test of these folders was asked for
}

status=0
run "$workers" "tests/unit tests/parity tests/fuzz" "$@"
run 2 "tests/cli tests/distributed tests/slow tests/gpu" "$@"
exit "$status"
