#!/usr/bin/env bash
# SmolLM2-135M learns reasoning-gym's chain_sum (sums and differences of two or three one-digit numbers) on a CPU.
#
#   bash examples/chain_sum/train.sh [KEY=VALUE ...]
#
# The task comes from reasoning-gym (extra `tasks`) and is scored by its own scorer; nothing else is written here.
set -euo pipefail
model=${MODEL:-data/smollm2}
# Two answered problems before each prompt show the form of an answer; without them a model of this size talks, hardly
# any response scores, and there is nothing to learn from.
template="<|im_start|>user
3 + 4 =<|im_end|>
<|im_start|>assistant
7<|im_end|>
<|im_start|>user
2 - 8 + 1 =<|im_end|>
<|im_start|>assistant
-5<|im_end|>
<|im_start|>user
{{ messages[-1].content.split(': ')[-1].strip() }}<|im_end|>
<|im_start|>assistant{{ '\\n' }}"
task='reasoning_gym:chain_sum/min_terms:2/max_terms:3/min_digits:1/max_digits:1'

[ -d "$model" ] || crossrl model smollm2 --out "$model"

crossrl train \
    algorithm.adv_estimator=grpo \
    data.train_files="$task/size:400" \
    data.val_files="$task/size:64" \
    data.train_batch_size=8 \
    data.max_prompt_length=96 \
    data.max_response_length=5 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.custom_chat_template="\"$template\"" \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=3 \
    actor_rollout_ref.actor.optim.zero_indexed_step=False \
    actor_rollout_ref.actor.optim.betas='[0.9,0.95]' \
    actor_rollout_ref.rollout.n=12 \
    trainer.total_training_steps=40 \
    trainer.test_freq=10 \
    trainer.log_val_generations=4 \
    trainer.project_name=examples \
    trainer.experiment_name=chain_sum \
    trainer.default_local_dir=outputs/chain_sum \
    "$@"
