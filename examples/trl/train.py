"""TRL's GRPOTrainer for agents on a gateway: README.md."""

import sys
from pathlib import Path

from transformers import AutoTokenizer
from trl import GRPOConfig

from tidegate.trainer.trl import GatewayGRPOTrainer, Rollouts

GROUPS, EPISODES, RATE = 4, 8, 4e-4


def main(gateway, engine, base, directory, steps=80):
    with Rollouts(gateway, [engine], Path(directory), max_staleness=2) as rollouts:
        trainer = GatewayGRPOTrainer(
            rollouts,
            GRPOConfig(
                output_dir=f"{directory}/trl",
                max_steps=int(steps),
                per_device_train_batch_size=GROUPS * EPISODES,
                num_generations=EPISODES,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                epsilon_high=0.28,
                bf16=False,
                save_strategy="no",  # `rollouts` saves each step
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
            ),
            model=rollouts.checkpoint or base,
            processing_class=AutoTokenizer.from_pretrained(base),
        )
        trainer.train(resume_from_checkpoint=rollouts.checkpoint)


main(*sys.argv[1:])
