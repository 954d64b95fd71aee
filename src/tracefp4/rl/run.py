"""A run from its config: load, warm-start, build engine and trainer, loop, evaluate, write the record.

The flow of one step::

    prompts -> engine (records guidance) -> rewards -> advantages -> drop what trains nothing
            -> micro-batches, each loads its own guidance -> guided forward, loss, backward -> optimizer
            -> sync: push weights, compare checksums, weight version + 1

Every random draw is keyed by the run's seed and the step, and the engine keeps nothing from one sync to the next, so a
resumed run continues exactly: on a CPU its metrics equal those of the uninterrupted run bit for bit.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.config import Config, to_toml
from tracefp4.errors import CheckpointError, GuidanceMissing, SyncError
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.frame import Expectation
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.guidance.sizes import bytes_per_token
from tracefp4.methods import get_method
from tracefp4.models.binding import bind
from tracefp4.models.coverage import Coverage, compare, coverage, probe, render
from tracefp4.models.layout import describe
from tracefp4.models.directory import cache_dir
from tracefp4.models.loading import load_model
from tracefp4.models.packing import model_digest
from tracefp4.rl.collect import digest_experience, make_requests, sampling_params, score
from tracefp4.rl.evaluate import evaluate
from tracefp4.rl.journal import Journal, make_tracker
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.setup import check_training, config_hash, resolve_device
from tracefp4.rl.sft_data import gold_pairs
from tracefp4.rl.tasks import make_task
from tracefp4.rl.update import GuidanceSource, Updater
from tracefp4.rl.warm_start import warm_start
from tracefp4.rollout.registry import make_engine
from tracefp4.training import checkpoint
from tracefp4.training.batch import MicroBatch
from tracefp4.training.checkpoint import TrainState
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.policy import token_logprobs
from tracefp4.training.sites import TrainerSites


class Run:
    """One training run.

    Args:
        config: the resolved settings.
        note: called with a sentence when something worth a line happened.
        warm_progress: called with step and loss of the warm start.

    Raises:
        ConfigError: settings that contradict each other.
        CheckpointError: the folder holds a checkpoint of other settings.
    """

    def __init__(
        self,
        config: Config,
        note: Callable[[str], None] = lambda _: None,
        warm_progress: Callable[[int, float], None] | None = None,
    ) -> None:
        check_training(config)
        self.config, self.note = config, note
        self.folder, self.device = Path(config.output_dir), resolve_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.method = get_method(config.method)
        spec = get_spec(config.spec, config.numerics)
        self.rollout_spec, self.trainer_spec = self.method.rollout_spec(spec), self.method.trainer_spec(spec)
        self.plan = Plan.parse(config.plan) if self.method.guided else None
        self.task = make_task(config.task)
        loaded = load_model(config.policy, device=self.device)
        self.model, self.tokenizer, self.source = loaded.model, loaded.tokenizer, loaded.source
        self.prompter = Prompter(self.tokenizer, config.task)
        self.warm_start_hash = self._warm_start(warm_progress)
        self.step = self.version = 0
        self._build()
        self._resume()

    def _warm_start(self, progress: Callable[[int, float], None] | None) -> str:
        config = self.config

        def pairs(step: int):  # noqa: ANN202
            items = self.task.items("train", config.warm_start.batch_size, (config.seed, "warm-start", step))
            return gold_pairs(items, self.prompter)

        return warm_start(
            self.model,
            config.warm_start,
            pairs,
            identity={"task": config.task.model_dump(mode="json"), "seed": config.seed},
            cache=cache_dir() / "warm-starts",
            micro_tokens=config.train.micro_tokens,
            progress=progress,
        )

    def _build(self) -> None:
        config = self.config
        self.store = MemoryStore()
        self.engine = make_engine(
            config.engine,
            model=copy.deepcopy(self.model),
            tokenizer=self.tokenizer,
            spec=self.rollout_spec,
            plan=self.plan,
            store=self.store,
            settings=config.rollout,
        )
        reference = copy.deepcopy(self.model) if config.loss.kl > 0 else None
        if config.train.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.layout = describe(self.model)
        self.sites = TrainerSites(self.layout, self.trainer_spec, config.decoder)
        bind(self.model, self.sites, spec=self.trainer_spec)
        self.optimizer = MasterAdamW(self.model.named_parameters(), config.optimizer)
        self.updater = Updater(
            self.model, self.sites, self.optimizer, config, self._reference(reference) if reference is not None else None
        )

    def _reference(self, model: Any) -> Callable[[MicroBatch], Tensor]:
        sites = TrainerSites(self.layout, self.trainer_spec)
        bind(model, sites)

        @torch.no_grad()
        def logprobs(batch: MicroBatch) -> Tensor:
            with sites.batch(batch, guided=False):
                return token_logprobs(model, batch, self.config.sampling.temperature)[0]

        return logprobs

    def describe(self, say: Callable[[str], None]) -> None:
        """Say what this run is: the policy, both sides' coverage, and whether they agree.

        Raises:
            CoverageError: a site was missed, or a method that quantizes both sides alike does not.
        """
        theirs = self.engine.coverage()
        mine = self.trainer_coverage()
        say(f"policy {self.config.policy} on {self.device}; method {self.method.name}; warm start {self.warm_start_hash}")
        for key, value in self.source.items():
            say(f"  {key}: {value}")
        say(f"rollout: {render(theirs)}")
        if self.rollout_spec.hash == self.trainer_spec.hash:
            compare(theirs, mine)
            say("trainer: the same, checked module by module")
        else:
            say(f"trainer: {render(mine)}")
        if self.plan is not None:
            size = bytes_per_token(self.plan, self.layout.site_shapes(self.rollout_spec), self.layout.num_layers)
            say(f"guidance {self.plan}: {size:.0f} B a token")

    @torch.no_grad()
    def trainer_coverage(self) -> Coverage:
        """What the trainer quantizes, watched during one short forward."""
        ids = torch.arange(8, device=self.device)[None] + 1
        with probe(self.model) as calls:
            self.model.get_decoder()(input_ids=ids, use_cache=False)
        return coverage(self.model, self.trainer_spec, calls)

    # The loop -------------------------------------------------------------------------------------------------------

    def train(self, on_step: Callable[[int, dict[str, Any]], None], stop: Callable[[], bool] = lambda: False) -> None:
        """Run the remaining steps, evaluate, and write everything to the run's folder.

        Args:
            on_step: called with each finished step and its metrics.
            stop: asked between steps; when true, a checkpoint is written and the loop ends.
        """
        config = self.config
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        tracker = make_tracker(config.tracker, self.folder, config.model_dump(mode="json"))
        journal = Journal(self.folder, tracker, from_step=self.step)
        try:
            self.sync()
            if self.step == 0:
                self._evaluate(journal)
            deadline = time.monotonic() + 60 * config.max_minutes if config.max_minutes else float("inf")
            while self.step < config.steps and not stop():
                metrics = self.run_step(journal)
                journal.metrics(self.step, metrics)
                on_step(self.step, metrics)
                self.step += 1
                over = self.step == config.steps or time.monotonic() >= deadline
                every = config.eval.every
                if over or (every and self.step % every == 0):
                    self._evaluate(journal)
                if over:
                    break
                if config.train.checkpoint_every and self.step % config.train.checkpoint_every == 0:
                    self.save()
            if config.train.save_final:
                self.save()
        finally:
            journal.close()
            self.task.close()

    def run_step(self, journal: Journal) -> dict[str, Any]:
        """One step of RL; returns its metrics."""
        config, clock = self.config, Clock()
        items = self.task.items("train", config.train.prompts, (config.seed, "step", self.step))
        requests = make_requests(
            items, self.prompter, sampling_params(config), config.train.samples, config.seed, f"step-{self.step}"
        )
        with clock("rollout"):
            rollouts = self.engine.generate(requests, guidance=self.plan is not None)
        repeated = [item for item in items for _ in range(config.train.samples)]
        with clock("reward"):
            texts, rewards = score(rollouts, repeated, self.task, self.decode)
        store = self.store if self.plan is not None else None
        guidance_bytes = sum(r.guidance.nbytes for r in rollouts if r.guidance is not None)
        experience = digest_experience(rollouts, repeated, texts, rewards, config, store)
        metrics: dict[str, Any] = dict(experience.metrics)
        with clock("train"):
            if experience.examples:
                every = config.train.unguided_every
                metrics |= self.updater.update(
                    experience.examples, self._loader(rollouts), measure_unguided=bool(every) and self.step % every == 0
                )
                self._check_coverage(metrics)
        with clock("sync"):
            self.store.clear()
            self.version += 1
            self.sync()
        tokens = sum(len(r.response_ids) for r in rollouts)
        metrics |= clock.metrics()
        metrics["throughput/rollout_tok_s"] = tokens / max(metrics["time/rollout_s"], 1e-9)
        metrics["throughput/train_tok_s"] = metrics.get("train/tokens", 0.0) / max(metrics["time/train_s"], 1e-9)
        metrics["weight_version"] = self.version
        if guidance_bytes:
            metrics["guidance/bytes_per_token"] = guidance_bytes / sum(r.rows for r in rollouts)
        for i in range(min(4, len(rollouts))):
            journal.sample(self.step, {"prompt": self.decode(rollouts[i].prompt_ids), "response": texts[i], "reward": float(rewards[i])})
        return metrics

    def sync(self) -> None:
        """Push the trainer's bfloat16 weights to the engine and prove that both sides quantize the same ones."""
        digest = self.engine.sync(dict(self.model.named_parameters()), self.version)
        mine = model_digest(self.model, self.layout, self.rollout_spec.weights)
        if digest != mine:
            raise SyncError(f"weights differ after sync {self.version}: engine {digest}, trainer {mine}")

    def decode(self, ids: Any) -> str:
        """Token ids to text, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _loader(self, rollouts: list[Any]) -> GuidanceSource | None:
        if self.plan is None:
            return None
        expect = Expectation(
            numerics_hash=self.rollout_spec.hash,
            plan=str(self.plan),
            weight_version=self.version,
            max_lag=self.config.train.max_lag,
        )
        return GuidanceSource(self.store, rollouts, expect)

    def _check_coverage(self, metrics: dict[str, Any]) -> None:
        if self.plan is None:
            return
        coverage, least = metrics.get("guidance/coverage", 0.0), self.config.train.min_coverage
        if coverage < least:
            raise GuidanceMissing(f"step {self.step}: guidance covers {coverage:.4f} of the rows, less than {least}")

    def _evaluate(self, journal: Journal) -> None:
        config = self.config
        if not config.eval.items:
            return
        found = evaluate(
            self.engine,
            self.task,
            self.prompter,
            items=config.eval.items,
            samples=config.eval.samples,
            sampling=sampling_params(config, config.eval.temperature),
            seed=config.seed,
            decode=self.decode,
        ).metrics(self.task.name)
        journal.metrics(self.step, found)
        self.note(f"step {self.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items() if isinstance(v, float)))

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write a checkpoint of the current step."""
        state = TrainState(self.step, self.version, self.optimizer.steps, self._identity())
        model = {name: p.detach() for name, p in self.model.named_parameters()}
        folder = checkpoint.save(
            self.folder / "checkpoints", model, self.optimizer.state(), state, self.config.train.keep_checkpoints
        )
        self.note(f"checkpoint {folder}")
        return folder

    def _resume(self) -> None:
        found = checkpoint.complete(self.folder / "checkpoints")
        if not found:
            return
        model, optimizer, state = checkpoint.load(found[-1])
        if state.config_hash != self._identity():
            raise CheckpointError(
                f"{found[-1]} was written with other settings; choose another output_dir or remove the folder"
            )
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in model.items():
                parameters[name].copy_(tensor)
        self.optimizer.load(optimizer, state.optimizer_steps)
        self.step, self.version = state.step, state.weight_version
        self.note(f"resumed from {found[-1]}")

    def _identity(self) -> str:
        return f"{config_hash(self.config)}-{self.warm_start_hash}"


class Clock:
    """Wall time of the parts of a step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a ``with`` block; the device is waited for at its end."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._seconds[name] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """``time/<name>_s`` of each part, and ``time/step_s`` since the clock was made."""
        return {f"time/{name}_s": s for name, s in self._seconds.items()} | {
            "time/step_s": time.perf_counter() - self._start
        }
