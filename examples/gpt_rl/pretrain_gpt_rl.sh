#!/bin/sh
# GRPO in the training loop of Megatron-LM: warm-up, then reinforcement learning. Run it in the root
# of this repository:
#   MEGATRON_LM_PATH=<checkout of core_v0.16.1> [NPROC=2] [TP=2] [PP=1] \
#       [OUT=runs/pretrain_gpt_rl] [STEPS=160] sh examples/gpt_rl/pretrain_gpt_rl.sh
set -eu
: "${MEGATRON_LM_PATH:?name a checkout of Megatron-LM, core_v0.16.1}"
NPROC=${NPROC:-2} TP=${TP:-2} PP=${PP:-1} OUT=${OUT:-runs/pretrain_gpt_rl}
STEPS=${STEPS:-160} WARM_UP=${WARM_UP:-800} SAVE=${SAVE:-40}
export PYTHONPATH="$PWD:$MEGATRON_LM_PATH${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1

# The model of examples/gpt_rl/model/config.json.
MODEL="--num-layers 4 --hidden-size 128 --ffn-hidden-size 384
    --num-attention-heads 4 --kv-channels 32 --group-query-attention --num-query-groups 2
    --qk-layernorm --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 10000
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --max-position-embeddings 64 --vocab-size 13
    --make-vocab-size-divisible-by 1"
COMMON="--transformer-impl local --distributed-backend gloo --use-cpu-initialization
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-swiglu-fusion --no-rope-fusion
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
    --seq-length 10 --micro-batch-size 64 --num-workers 0 --dataloader-type single
    --split 100,0,0 --eval-iters 0 --eval-interval 1000
    --attention-backend unfused --no-bias-dropout-fusion --calculate-per-token-loss
    --ckpt-format torch --no-load-rng --no-save-rng --seed 1234
    --override-opt_param-scheduler --lr-decay-style constant --clip-grad 1.0 --weight-decay 0
    --log-interval 20"

run() {
    python -m hybrid_engine run --nproc-per-node "$NPROC" \
        -m megatron_patches examples/gpt_rl/pretrain_gpt_rl.py $MODEL $COMMON "$@"
}

if [ ! -e "$OUT/warm_up/latest_checkpointed_iteration.txt" ]; then
    run --rl-stage warm-up --train-iters "$WARM_UP" --global-batch-size 128 \
        --lr 3e-3 --lr-warmup-fraction 0.025 \
        --save "$OUT/warm_up" --save-interval "$WARM_UP"
fi
run --rl-stage reward --train-iters "$STEPS" --global-batch-size 256 --lr 3e-4 \
    --pretrained-checkpoint "$OUT/warm_up" --load "$OUT/reward" \
    --save "$OUT/reward" --save-interval "$SAVE" \
    --tensorboard-dir "$OUT/tensorboard" --enable-resharding \
    --resharding-config examples/gpt_rl/configs/pretrain_gpt_rl.yaml \
    --resharding-at-start --resharding-interval 4 \
    --resharding-output "$OUT" --resharding-callback examples.gpt_rl.rollouts:collect
