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

step test-quantize 90 "$python" -m pytest tests/kernels/test_quantize.py tests/kernels/test_guided.py tests/kernels/test_residual.py tests/kernels/test_seams.py tests/kernels/test_place.py -m gpu -q
step test-products 90 "$python" -m pytest tests/kernels/test_attention.py tests/kernels/test_experts.py tests/kernels/test_choice.py tests/kernels/test_sample.py tests/kernels/test_step.py tests/kernels/test_norm.py -m gpu -q
bench codec 30 codec
bench qat 45 qat
bench experts 180 experts --shape 30b --batch 1 --batch 16 --batch 64 --batch 256
bench experts-many 60 experts --shape smollm2-moe --batch 512
bench experts-skew 60 experts --shape 30b --batch 16 --batch 64 --skew 1 --quick
bench attention 120 attention
bench prefill-attention 60 attention --chunk 2048
bench experts-prefill 60 experts --shape 30b --batch 8192 --quick
step test-delta 60 "$python" -m pytest tests/kernels/test_convolution.py tests/kernels/test_delta_rule.py tests/kernels/test_delta_step.py -m gpu -q
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
step test-engine 120 "$python" -m pytest tests/kernels/test_engine.py tests/rollout/test_gpu.py tests/guidance/test_ring.py -m gpu -q
bench capture 60 capture
bench prefill 120 prefill
step profile-train 90 "$python" benchmarks/profile_steps.py train --batch 16 --context 512 --arm bf16 --arm "fp4 qat" --arm "fp4 guided" --output "$out/profile-train.json"
step profile-rollout 90 "$python" benchmarks/profile_steps.py rollout --compile --output "$out/profile-rollout.json"
