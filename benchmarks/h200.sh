#!/bin/sh
# Tests and benchmarks of one GPU, one after the other; what fails or hangs does not stop the rest.
#
#     sh benchmarks/h200.sh FOLDER
#
# FOLDER gets one log and one JSON file a step. Every step has a limit; an hour for all of them.
out=${1:?usage: sh benchmarks/h200.sh FOLDER}
python=${PYTHON:-python}
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"

step() { # name, seconds, command...
    name=$1 limit=$2
    shift 2
    begin=$(date +%s)
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name: exit $code after $(($(date +%s) - begin)) s"
    tail -n 4 "$out/$name.log"
}

bench() { # name, seconds, arguments...
    name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" -m tracefp4.cli.main bench "$@" --output "$out/$name.json"
}

# Every test that a GPU runs, the slow ones too; a list of files would be short of the newest ones. Needs pytest-xdist.
step tests 300 "$python" -m pytest tests -m gpu -n "${WORKERS:-6}" -q --continue-on-collection-errors --durations 20
bench codec 30 codec
bench qat 45 qat
bench experts 180 experts --shape 30b --batch 1 --batch 16 --batch 64 --batch 256
bench experts-many 60 experts --shape smollm2-moe --batch 512
bench experts-skew 60 experts --shape 30b --batch 16 --batch 64 --skew 1 --quick
bench attention 120 attention
bench prefill-attention 60 attention --chunk 2048
bench experts-prefill 60 experts --shape 30b --batch 8192 --quick
bench delta 60 delta
bench decode 100 decode --batch 1 --batch 16 --batch 64
bench decode-compiled 150 decode --batch 1 --batch 16 --batch 64 --budget 0 --arm bf16 --arm nvfp4-w4a4-kv4 --compile
bench decode-35b 150 decode --shape 35b --batch 1 --batch 16 --batch 64 --budget 0 --arm bf16 --arm nvfp4-w4a4-kv4 --compile
bench decode-limited 60 decode --shape 30b --batch 1 --context 8192 --context 32768 --arm bf16 --arm nvfp4-w4a4-kv4 --compile
bench decode-35b-limited 150 decode --shape 35b --batch 1 --context 8192 --context 32768 --arm bf16 --arm nvfp4-w4a4-kv4 --compile
bench decode-figure14 240 decode --shape 30b --batch 64 --budget 0 --compile
bench decode-whole 400 decode --shape 30b --layers 48 --batch 1 --batch 64 --arm bf16 --arm nvfp4-w4a4-kv4 --compile
bench decode-35b-whole 400 decode --shape 35b --layers 40 --batch 64 --arm bf16 --arm nvfp4-w4a4-kv4 --compile
bench decode-35b-states 240 decode --shape 35b --batch 64 --arm bf16 --arm nvfp4-w4a4-kv4 --compile --state-dtype bfloat16
bench decode-peer 150 decode --batch 1 --batch 64 --budget 0 --arm bf16 --arm transformers --compile
bench rollout 90 rollout
bench rollout-compiled 120 rollout --compile
bench capture 60 capture
bench prefill 120 prefill
step profile-train 90 "$python" benchmarks/profile_steps.py train --batch 16 --context 512 --arm bf16 --arm "fp4 qat" --arm "fp4 guided" --output "$out/profile-train.json"
step profile-rollout 90 "$python" benchmarks/profile_steps.py rollout --compile --output "$out/profile-rollout.json"
