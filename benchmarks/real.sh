#!/usr/bin/env bash
# Real files and whole models on one and two GPUs, in parts of minutes:
#
#   benchmarks/real.sh start                  Qwen3.5-VL 2B on pages: three starts, the first without compiled kernels
#   benchmarks/real.sh pages                  Qwen3.5-VL and Qwen3-VL 2B on pages, with all cores and with four
#   benchmarks/real.sh mixture                Qwen2.5-Omni 3B on pages, 720p videos and speech, likewise
#   benchmarks/real.sh whole RECIPE SIZE      two GPUs, EP 2: all weights of a model with experts on pages and videos; ends after
#                                                  $STEPS (22) steps, with an evaluation at step 20; with train.save_every=12
#                                                  also once the save is on the disk
#   benchmarks/real.sh resume RECIPE SIZE     goes on from that save for two steps, the page cache dropped (as root)
#   benchmarks/real.sh adapters RECIPE SIZE   two GPUs, EP 2: its adapters on the same files
#   benchmarks/real.sh layouts                Qwen3.5-VL 2B under TP 2 and CP 2, and on one GPU
#
# Keys with a dot behind the part go to every command of it. Results are written to $OUT (./real), rows to $ROWS ($OUT/rows). Weights are
# random. --dry-run runs the same commands for real on the CPU, with tiny models.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
part=${1:-}
shift || true
dry=
words=()
more=()
for word in "$@"; do
    case "$word" in
    --dry-run) dry=yes ;;
    *.*=*) more+=("$word") ;;
    *) words+=("$word") ;;
    esac
done
out=${OUT:-real}
rows=${ROWS:-$out/rows}
steps=${STEPS:-22}
mkdir -p "$out"

if [ -n "$dry" ]; then
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
    dense=tiny omni=tiny row=4096 wide=4096 small=4096 pages=24 videos=2 clips=4 samples=12 few=4 evaluated=2
    steps=${STEPS:-3} whole=() more+=(engine.threads=1)
else
    dense=2b omni=3b row=16384 wide=32768 small=8192 pages=600 videos=40 clips=100 samples=300 few=32 evaluated=20
    whole=(train.exp_avg_dtype=fp8 train.exp_avg_sq_dtype=fp8 train.main_grads_dtype=bf16 train.optimizer_offload_fraction=0.4 machine.host_memory_gb=250)
fi

pinned=() # the command that zoo runs under
zoo() { ${pinned[@]+"${pinned[@]}"} "$python" -m zoo "$@"; }

# bench NAME KEY=VALUE...: into $OUT/NAME.json
bench() {
    local name=$1
    shift
    zoo bench train out="$out/$name.json" backends=torch passes=1 engine.doctor=false "$@" ${more[@]+"${more[@]}"}
}

# files NAME KIND=COUNT...: rows of such files in $ROWS/NAME
files() {
    local name=$1
    shift
    [ -e "$rows/$name/rows.jsonl" ] || "$python" "$here/media_rows.py" "$rows/$name" "$@"
}

# train RUN KEY=VALUE...
train() {
    local name=$1
    shift
    zoo train model.init=random parallel.plan=[] run.dir="$out/$name" export=false log.tensorboard=false "$@" ${more[@]+"${more[@]}"}
}

start() {
    files pages pages="$pages"
    export XDG_CACHE_HOME="$out/caches" TRITON_CACHE_DIR="$out/caches/triton"
    for number in 1 2 3; do
        train "start-$number" recipe=qwen35_vl_sft size="$dense" nproc=1 data.train=["$rows/pages/rows.jsonl"] data.eval=none \
            packing.budget="$row" train.global_batch=1 train.steps=3 train.save=weights
        rm -rf "$out/start-$number/checkpoints"
        grep '"startup"' "$out/start-$number/train.jsonl"
    done
    cp "$XDG_CACHE_HOME"/zoo/doctor/*.json "$out/" 2>/dev/null || echo "no kernels were checked"
}

pages() {
    files pages pages="$pages"
    local keys=(data="$rows/pages/rows.jsonl" samples="$samples" size="$dense")
    bench pages "${keys[@]}" recipe=qwen35_vl_sft settings="row:$row"
    on_four bench pages-4-cores "${keys[@]}" recipe=qwen35_vl_sft settings="row:$row"
    bench pages-qwen3 "${keys[@]}" recipe=qwen3_vl_sft settings="row:$row"
}

mixture() {
    files mixture pages="$pages" videos="$videos" clips="$clips"
    local keys=(data="$rows/mixture/rows.jsonl" samples="$samples" size="$omni" recipe=qwen25_omni_sft settings="row:$small")
    bench mixture "${keys[@]}"
    on_four bench mixture-4-cores "${keys[@]}"
}

# on_four COMMAND: with four cores, where there are more
on_four() {
    pinned=(taskset -c "$("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0))[:4], sep=",")')")
    "$@"
    pinned=()
}

# The run is killed at its last step: what is measured are steps, an evaluation, memory and a save.
whole() {
    files vision pages="$pages" videos="$videos"
    train_whole
    until_step "$steps"
    case "${more[*]-}" in *train.save_every=*) until_logged '"event": "save"' ;; esac
    kill_whole
    grep -h '"startup"\|"memory"\|"eval\|"event": "save"' "$run/train.jsonl"
    grep '"grad_norm"' "$run/train.jsonl" | tail -n 1
}

resume() {
    local recipe=${words[0]:?a recipe is wanted} saved at file
    run=$out/whole-$recipe
    saved=$(find "$run/checkpoints" -mindepth 1 -maxdepth 1 -name '[!.]*' | sort -V | tail -n 1)
    at=$((10#${saved##*[!0-9]}))
    file=$(find "$saved" -type f -size +1k -printf '%s %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-)
    sync
    [ -n "$dry" ] || { echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null || echo "real.sh: the page cache was kept"
    dd if="$file" of=/dev/null bs=16M count=500 iflag=direct 2>&1 | tail -n 1
    train_whole
    until_step $((at + 2))
    kill_whole
    grep -h '"startup"\|"resume"' "$run/train.jsonl" | tail -n 2
    grep -h "\"step\": $((at + 1)), \"loss\"" "$run/train.jsonl"
}

train_whole() {
    local recipe=${words[0]:?a recipe is wanted} size=${words[1]:?a size is wanted}
    run=$out/whole-$recipe
    begun=$(date +%s)
    train "whole-$recipe" recipe="$recipe" size="$size" nproc=2 parallel.ep=2 data.train=["$rows/vision/rows.jsonl"] \
        data.eval=["$rows/vision/held.jsonl"] packing.budget="$small" train.global_batch=2 train.steps=100000 train.eval_every="$evaluated" \
        train.save=weights train.save_every=0 train.keep=1 train.keep_best=null engine.recompute=full engine.doctor=false \
        ${whole[@]+"${whole[@]}"} &
    shell=$!
}

until_step() { until_logged "\"step\": $1,"; }

until_logged() {
    until logged "$1"; do
        kill -0 "$shell" || { echo "real.sh: the run has ended before $1" >&2; exit 1; }
        sleep 0.5
    done
}

# logged WORDS: whether the log has a line with these words that was written since the run began
logged() {
    [ -e "$run/train.jsonl" ] &&
        awk -F '"time": ' -v begun="$begun" -v words="$1" '$NF + 0 >= begun && index($0, words) { found = 1 } END { exit !found }' "$run/train.jsonl"
}

kill_whole() {
    kill -KILL $(descendants "$shell")
    wait "$shell" || true
}

descendants() {
    local child
    for child in $(cat /proc/"$1"/task/*/children); do descendants "$child"; done
    echo "$1"
}

adapters() {
    files vision pages="$pages" videos="$videos"
    local recipe=${words[0]:?a recipe is wanted} size=${words[1]:?a size is wanted}
    bench "adapters-$recipe" recipe="$recipe" size="$size" nproc=2 parallel.ep=2 engine.recompute=selective settings="row:$row" \
        data="$rows/vision/rows.jsonl" samples="$samples"
}

layouts() {
    local keys=(size="$dense")
    bench layouts-1 "${keys[@]}" nproc=1 settings="row:$row" samples="$few"
    bench layouts-tp2 "${keys[@]}" nproc=2 settings="row:$small" samples="$few" parallel.tp=2 --profile
    bench layouts-cp2 "${keys[@]}" nproc=2 settings="row:$wide" samples=$((2 * few)) parallel.cp=2 --profile
}

case "$part" in
start | pages | mixture | whole | resume | adapters | layouts) "$part" ;;
*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 2
    ;;
esac
