#!/usr/bin/env bash
# Eight GPUs in one node, in parts that are meant to take less than ten minutes each:
#
#   benchmarks/eight.sh receipts      Qwen3.5-VL 2B: 2 and 4 samples a GPU, padded to 2,048 tokens and packed
#   benchmarks/eight.sh scaling       Qwen3.5-VL 2B: rows of 16,384 tokens on eight GPUs and on one
#   benchmarks/eight.sh experts       Qwen3-VL and Qwen3-Omni 30B-A3B: all weights trained under EP 8
#   benchmarks/eight.sh layouts       Qwen3.5-VL 2B under TP 2 x CP 2 x DP 2, and the losses of DP 8
#   benchmarks/eight.sh pipeline      Qwen3-VL 30B-A3B under PP 2 x EP 4, and the losses of EP 8
#   benchmarks/eight.sh checkpoints   Qwen3-VL 30B-A3B: a save under EP 8, then one rank is killed
#   benchmarks/eight.sh resume        that run under EP 4 x DP 2, and its export
#   benchmarks/eight.sh tables        what is there so far, as Markdown
#
# Keys with a dot behind the part go to every command of it. Results are written to $OUT (./eight). The run of the last two
# parts is written to $RUN ($OUT/run), on a disk with room for 500 GB, in a host with 250 GB to spare. --dry-run runs the same commands for
# real on eight processes of the CPU, with tiny models.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
part=${1:-}
shift || true
dry=
more=()
for word in "$@"; do
    if [ "$word" = --dry-run ]; then dry=yes; else more+=("$word"); fi
done
out=${OUT:-eight}
run=${RUN:-$out/run}
mkdir -p "$out"

if [ -n "$dry" ]; then
    export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
    dense=tiny experts=tiny-moe omni=tiny longest=64 row=160 deep_row=160 row_samples=8 samples=2 few=2 budget=512 apart=2 dd_mb=64
    half_moments=()
    dense_keys=(model.arch.text_config.linear_num_key_heads=4 model.arch.text_config.linear_num_value_heads=4)
    vl_keys=(model.arch.text_config.num_experts=8) omni_keys=(model.arch.thinker_config.text_config.num_experts=8)
    machine=cpu more+=(engine.threads=1)
else
    dense=2b experts=30b-a3b omni=30b-a3b longest=2048 row=16384 deep_row=8192 row_samples=32 samples=8 few=4 budget=4096 apart=20 dd_mb=16384
    dense_keys=() vl_keys=() omni_keys=() machine=auto
    half_moments=(train.exp_avg_dtype=bf16 train.exp_avg_sq_dtype=bf16) # 8 bytes a parameter on the disk in the place of 12
fi

zoo() { "$python" -m zoo "$@"; }
eight_tables() { PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} "$python" -m benchmarks.eight_tables "$@"; }

# bench NAME KEY=VALUE...: into $OUT/NAME.json
bench() {
    local name=$1
    shift
    zoo bench train out="$out/$name.json" backends=torch passes=1 longest="$longest" engine.doctor=false "$@" ${more[@]+"${more[@]}"}
}

# memory NAME KEY=VALUE...: what the planner says of it, into $OUT/NAME-plan.json
memory() {
    local name=$1
    shift
    zoo plan hardware="$machine" ranks=8 --json model.init=random parallel.plan=[] packing.budget="$deep_row" train.global_batch=8 \
        media=0.7 labels=0.3 "$@" ${more[@]+"${more[@]}"} >"$out/$name-plan.json"
}

receipts() {
    for count in 2 4; do
        bench "receipts-$count" size="$dense" nproc=8 settings="padded:${count}x$longest,packed:$count" samples=$((4 * count))
    done
}

scaling() {
    bench scaling-8 size="$dense" nproc=8 settings="row:$row" samples="$row_samples"
    bench scaling-1 size="$dense" nproc=1 settings="row:$row" samples="$row_samples"
}

experts() {
    local keys=(recipe=qwen3_vl_moe_sft size="$experts" parallel.ep=8 engine.recompute=selective ${vl_keys[@]+"${vl_keys[@]}"})
    memory experts-vl "${keys[@]}"
    bench experts-vl "${keys[@]}" nproc=8 settings="row:$deep_row" samples="$row_samples"
    keys=(recipe=qwen3_omni_sft size="$omni" parallel.ep=8 engine.recompute=selective ${omni_keys[@]+"${omni_keys[@]}"})
    memory experts-omni "${keys[@]}"
    bench experts-omni "${keys[@]}" nproc=8 settings="row:$deep_row" samples="$row_samples"
}

# Eight micro-batches of the same samples a step, whatever the number of data-parallel ranks.
layouts() {
    local keys=(size="$dense" nproc=8 batch=8 settings="packed:$samples" ${dense_keys[@]+"${dense_keys[@]}"})
    bench layouts-dp8 "${keys[@]}" samples=$((2 * samples))
    bench layouts-tp2-cp2-dp2 "${keys[@]}" samples=$((8 * samples)) parallel.tp=2 parallel.sp=true parallel.cp=2
}

pipeline() {
    local keys=(recipe=qwen3_vl_moe_sft size="$experts" nproc=8 batch=8 settings="packed:$few" ${vl_keys[@]+"${vl_keys[@]}"})
    bench pipeline-ep8 "${keys[@]}" samples=$((2 * few)) parallel.ep=8
    bench pipeline-pp2-ep4 "${keys[@]}" samples=$((4 * few)) parallel.pp=2 parallel.ep=4
}

# One learning rate throughout, so that the resumed run repeats the steps behind the save whatever its number of steps.
train() {
    zoo train recipe=qwen3_vl_moe_sft size="$experts" model.init=random hardware="$machine" nproc=8 run.dir="$run" parallel.plan=[] \
        packing.budget="$budget" train.global_batch=8 train.lr=1e-5 train.min_lr=1e-5 train.warmup_steps=0 train.keep=1 \
        train.keep_best=null train.eval_rows=0 log.tensorboard=false engine.doctor=false ${vl_keys[@]+"${vl_keys[@]}"} ${half_moments[@]+"${half_moments[@]}"} \
        "$@" ${more[@]+"${more[@]}"}
}

children() { cat /proc/"${1// /}"/task/*/children; }

checkpoints() {
    if [ -e "$run" ]; then
        echo "eight.sh: $run is there already; remove it, or give RUN=..." >&2
        exit 2
    fi
    eight_tables disk "$(dirname "$run")" "$dd_mb" >"$out/disk.json"
    train parallel.ep=8 train.save_every="$apart" train.steps=1000 export=false &
    local shell=$! ranks=() before code=0
    until grep -qs '"event": "save"' "$run/train.jsonl"; do
        kill -0 "$shell" || { echo "eight.sh: the run has ended without a save" >&2; exit 1; }
        sleep 0.2
    done
    sleep 2
    read -ra ranks <<<"$(children "$(children "$shell")")"
    before=$(date +%s%3N)
    kill -KILL "${ranks[-1]}"
    wait "$shell" || code=$?
    echo "{\"exit\": $code, \"left_ms\": $(($(date +%s%3N) - before))}" >"$out/killed.json"
    cp "$run/train.jsonl" "$out/killed.jsonl"
}

resume() {
    local at
    at=$(eight_tables saved "$run")
    train parallel.ep=4 train.save=weights train.save_every=0 train.steps=$((at + 4)) export=true
    cp "$run/train.jsonl" "$out/resumed.jsonl"
}

tables() { :; }

case "$part" in
receipts | scaling | experts | layouts | pipeline | checkpoints | resume | tables) ;;
*)
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
    exit 2
    ;;
esac
if [ -z "$dry" ] && [ "$part" != tables ]; then
    gpus=$("$python" -c 'from zoo.config.devices import gpu_count; print(gpu_count())')
    if [ "$gpus" -lt 8 ]; then
        echo "eight.sh: eight GPUs in one node are wanted, and $gpus are here; try the script with --dry-run" >&2
        exit 2
    fi
fi
"$part"
eight_tables tables "$out"
