"""The same work with TRL's `GRPOTrainer`, as its users would run it on a CPU.

    python -m benchmarks.peer.trl_sync WORK.json

Needs `pip install arriero[peers]`. Generation is that of transformers, TRL's default without a vLLM server;
bfloat16 and gradient checkpointing, on by default, are off, as they are for all contenders.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers annotates only a part of what is called here.

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from benchmarks.peer.work import GROUPS, SAMPLES, Work, judged, order, rows


def main(path: str) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    # An optional extra without annotations: what checks this file needn't have it.
    trl, datasets = cast("Any", import_module("trl")), cast("Any", import_module("datasets"))

    work = Work(**json.loads(Path(path).read_text()))
    limits, data = work.limits, rows(work.data)
    loads: Any = AutoModelForCausalLM
    model = loads.from_pretrained(work.model, dtype=torch.float32)
    words: Any = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    out, rewards = Path(work.out).open("a", buffering=1), list[float]()  # noqa: SIM115  # until the process ends

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards[:] = judged(answer, completions, limits.judge_s)
        return [*rewards]

    class Record(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            print(json.dumps({"time": time.time(), "reward": sum(rewards) / len(rewards)}), file=out)

    chosen = [k for step in order(len(data), work.steps, work.seed) for k in step]
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=work.steps, seed=work.seed,
        per_device_train_batch_size=GROUPS * SAMPLES, num_generations=SAMPLES,
        max_completion_length=limits.max_new_tokens, temperature=1.0, top_k=0, top_p=1.0,
        learning_rate=work.lr, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        lr_scheduler_type="constant", beta=0.0, epsilon=0.2, loss_type="grpo", scale_rewards="group",
        use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        shuffle_dataset=False, report_to="none", save_strategy="no", logging_steps=10_000, disable_tqdm=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=words, callbacks=[Record()],
        train_dataset=datasets.Dataset.from_list([data[k] for k in chosen]),
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1])
