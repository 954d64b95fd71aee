"""What one rank, or a process alone, does for ``test_sharding.py``: gradients of chosen samples, or a short run.

Run as a program: ``sharded_run.py CONFIG FOLDER gradients|run``; under torchrun it is one rank of several. The first
rank leaves what it found in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from tracefp4 import config as settings
from tracefp4.rl.collect import digest_experience, make_requests, sampling_params, score
from tracefp4.rl.run import Run
from tracefp4.training.ranks import Ranks, joined
from tracefp4.training.sharding import weights, whole

CASES = {
    # samples, minibatches, gradient checkpointing, form of the weights that the engine gets
    "two": (2, 1, True, "packed"),
    "five": (5, 1, False, "bf16"),
    "one": (1, 4, False, "bf16"),
    "three": (3, 2, False, "bf16"),
}


def prepare(tree: dict, folder: Path, name: str, ranks: Ranks, *overrides: str) -> Run:
    for item in [*overrides, f"output_dir={folder / name}"]:
        settings._override(tree, item)
    return Run(settings.parse(tree), ranks=ranks)


def gradients(run: Run, samples: int, ranks: Ranks) -> tuple[dict[str, torch.Tensor], list[int], dict[str, float]]:
    """Every rank generates everything and trains on its share; returns gradients, frames read, metrics."""
    config = run.config
    run.sync()
    items = run.task.items("train", config.train.prompts, (config.seed, "step", 0))
    requests = make_requests(items, run.prompter, sampling_params(config), config.train.samples, config.seed, "step-0")
    rollouts = run.engine.generate(requests)
    repeated = [item for item in items for _ in range(config.train.samples)]
    texts, rewards = score(rollouts, repeated, run.task, run.prompter.decode)
    experience = digest_experience(rollouts, repeated, texts, rewards, config, run.store)
    chosen = experience.examples[:samples]
    source, read = run._loader(rollouts), []

    def load(examples):
        read.extend(example.index for example in examples)
        return source(examples)

    seen: dict[str, torch.Tensor] = {}
    step = run.optimizer.step

    def stepping() -> float:
        for name, grad in run.optimizer.gradients().items():
            found = whole(grad, run.optimizer.params[name]).clone()
            seen[name] = seen[name] + found if name in seen else found
        return step()

    run.optimizer.step = stepping
    metrics = run.updater.update(chosen[ranks.share(len(chosen))], load, measure_unguided=True)
    return seen, read, metrics


def main(tree: dict, folder: Path, what: str) -> None:
    with joined() as ranks:
        for name, (samples, minibatches, recompute, refit) in (CASES if what == "gradients" else {}).items():
            run = prepare(
                tree, folder, name, ranks, f"train.minibatches={minibatches}",
                f"train.gradient_checkpointing={str(recompute).lower()}", f"rollout.refit={refit}",
            )  # fmt: skip
            grads, read, metrics = gradients(run, samples, ranks)
            after = {f"after.{key}": tensor.clone() for key, tensor in weights(run.model).items()}
            reads = ranks.gather(sorted(set(read)))
            run.task.close()
            if ranks.first:
                save_file({**grads, **after}, folder / f"{name}.safetensors")
                (folder / f"{name}.json").write_text(json.dumps({"read": reads, "metrics": metrics}))
        tree["train"].update(minibatches=1, gradient_checkpointing=True)
        for steps in (1, 2) if what == "run" else ():
            run = prepare(tree, folder, "run", ranks, f"steps={steps}")
            run.describe(lambda text: None)
            run.train(lambda step, metrics: None)
            run.task.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3])
