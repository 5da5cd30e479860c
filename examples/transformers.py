"""Trains a small language model with the Hugging Face Trainer, whose checkpoints go to S3.

    torchrun --nproc-per-node 2 -m examples.transformers --url s3://bucket/run

If it is killed and started again, on any number of processes, it continues from the newest complete
checkpoint below ``--url``. Nothing is downloaded: the model is made from a config, the text is Python's own library.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dcp_s3.demo.train import standard_library_text
from dcp_s3.integrations.transformers import S3Trainer

#: Sequences per step over all processes: divisible by 1, 2, 3, 4 and 6 of them.
BATCH = 12
CONTEXT = 64


def main(arguments: list[str] | None = None) -> None:
    """Train with the options of the command line."""
    options = parse_arguments(arguments)
    args = TrainingArguments(
        output_dir=options.output_dir,  # for logs: no checkpoint is written there
        use_cpu=options.cpu,
        max_steps=options.steps,
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=options.save_every,
        learning_rate=1e-3,
        report_to="none",
    )
    args.per_device_train_batch_size = BATCH // args.world_size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    text = standard_library_text()[: 1000 * CONTEXT].long().view(-1, CONTEXT)
    trainer = S3Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=[{"input_ids": line, "labels": line} for line in text],
        checkpoint_root=options.url,
    )
    trainer.train(resume_from_checkpoint=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="examples.transformers", description=__doc__.partition("\n")[0])
    parser.add_argument("--url", required=True, help="s3://bucket/prefix of this run")
    parser.add_argument("--steps", type=int, default=100, help="train to here; default: %(default)s")
    parser.add_argument("--save-every", type=int, default=10, help="steps; default: %(default)s")
    parser.add_argument("--output-dir", default="output", help="default: %(default)s")
    parser.add_argument("--cpu", action=argparse.BooleanOptionalAction, default=True, help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
