"""A run from its config: load, warm-start, build engine and trainer, loop, evaluate, write the record.

The flow of one step::

    prompts -> engine (records guidance) -> rewards -> advantages -> drop what trains nothing
            -> micro-batches, each loads its own guidance -> guided forward, loss, backward -> optimizer
            -> sync: push weights, compare checksums, weight version + 1

Every random draw is keyed by the run's seed and the step, and the engine keeps nothing from one sync to the next, so a
resumed run continues exactly: on a CPU its metrics equal those of the uninterrupted run bit for bit. Only with
``train.lag`` it does not: batches that waited are not in a checkpoint, and are sampled anew.

Several ranks are one such run. Each has an engine and a store of its own, generates for its share of the prompts and
trains on what came of it; the model is sharded over them, and the first one writes the record.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tracefp4.config import Config
from tracefp4.config_text import to_toml
from tracefp4.errors import SyncError
from tracefp4.formats.spec import get_spec
from tracefp4.guidance.auto import LARGEST, budget_of
from tracefp4.guidance.frame import Expectation
from tracefp4.guidance.late_store import LateStore
from tracefp4.guidance.memory_store import MemoryStore
from tracefp4.guidance.plan import Plan
from tracefp4.methods import get_method
from tracefp4.models.binding import bind
from tracefp4.models.coverage import Coverage, coverage, probe
from tracefp4.models.layout import describe
from tracefp4.models.loading import load_model
from tracefp4.models.packing import Digest, model_digest
from tracefp4.rl.bf16_layers import settled
from tracefp4.rl.clock import Clock
from tracefp4.rl.collect import Experience, digest_experience, guidance_size, make_requests, sampling_params, score
from tracefp4.rl.description import describe_run
from tracefp4.rl.evaluate import evaluate
from tracefp4.rl.journal import Journal, NoJournal, make_tracker
from tracefp4.rl.plans import choose_measured, first_plan, resolved, spread, unbound_copy
from tracefp4.rl.prompts import Prompter
from tracefp4.rl.reference import Reference
from tracefp4.rl.routers import check_routers
from tracefp4.rl.setup import check_ranks, check_training, config_hash, resolve_device, sent_weights, weight_cache
from tracefp4.rl.start import prepare_keys, start_warm
from tracefp4.rl.tasks import make_task
from tracefp4.rl.update import GuidanceSource, Updater
from tracefp4.rollout.registry import make_engine
from tracefp4.training import checkpoint
from tracefp4.training.key_basis import FILE, write_bases
from tracefp4.training.optimizer import MasterAdamW
from tracefp4.training.policy import recompute_layers
from tracefp4.training.ranks import ALONE, Ranks
from tracefp4.training.sharding import shard, weights
from tracefp4.training.sites import TrainerSites
from tracefp4.training.weights import WeightOperands


class Run:
    """One training run.

    Args:
        config: the resolved settings.
        note: called with a sentence when something worth a line happened.
        warm_progress: called with step and loss of the warm start.
        ranks: the processes that are this run together.

    Raises:
        ConfigError: settings that contradict each other.
        CheckpointError: the folder holds a checkpoint of other settings.
    """

    def __init__(
        self,
        config: Config,
        note: Callable[[str], None] = lambda _: None,
        warm_progress: Callable[[int, float], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.method = get_method(config.method)
        config = resolved(config)
        check_training(config)
        check_ranks(config, ranks)
        self.config, self.note, self.ranks = config, note, ranks
        self.folder, self.device = Path(config.output_dir), resolve_device(config.device)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.task = make_task(config.task)
        loaded = load_model(config.policy, device=self.device, seed=config.seed)
        self.model, self.source = loaded.model, loaded.source
        self.tokenizer: Any = loaded.tokenizer
        self.prompter = Prompter(self.tokenizer, config.task)
        with ranks.first_before_others():
            self.start = start_warm(config, self.model, self.task, self.prompter, warm_progress)
        if self.source.get("upcycling") and config.warm_start.steps:
            note(f"routers: {check_routers(self.model, self.task, self.prompter, (config.seed, 'routers'))}")
        prepare_keys(config, self.model, self.method, self.task, self.prompter)
        self.step = self.version = 0
        self.backlog: deque[Experience] = deque()
        """Batches that wait to be trained on: ``train.lag`` of them."""
        saved = checkpoint.newest(self.folder / "checkpoints", self._identity())
        given = None if saved is None else saved.state.spec
        self.config = config = settled(config, given, self.model, self.tokenizer, self.task, self.prompter, note)
        spec = get_spec(config.spec, config.numerics)
        self.rollout_spec, self.trainer_spec = self.method.rollout_spec(spec), self.method.trainer_spec(spec)
        self._build(saved)

    def _build(self, saved: checkpoint.Saved | None) -> None:
        config = self.config
        self.store, self._digest = LateStore(MemoryStore()), Digest()
        self.layout = describe(self.model)
        self.shapes = self.layout.recordable_shapes(self.trainer_spec)
        self.budget = budget_of(config.plan) if self.method.guided else None
        """Bytes a token of a plan that is chosen as training goes; ``None`` for a fixed plan."""
        chosen = None if saved is None else saved.state.plan
        self.plan = first_plan(self.method, config.plan, self.layout.num_layers, chosen)
        cached = WeightOperands(self.trainer_spec.weights, weight_cache(config, self.ranks))
        self.sites = TrainerSites(self.layout, self.trainer_spec, config.decoder, cached)
        self.sites.pack_saved = not config.train.gradient_checkpointing and cached.cache == "packed"
        self._make_engine()
        start = copy.deepcopy(self.model) if config.loss.kl > 0 else None
        if saved is not None:
            checkpoint.restore(self.model, saved.model, f"checkpoint {saved.folder}")
        if config.train.gradient_checkpointing:
            recompute_layers(self.model)
        embedding: Any = self.model.get_input_embeddings()
        centering = config.loss.score_centering
        self.top_logprobs = min(config.loss.centering_top, embedding.num_embeddings) if centering else 0
        bind(self.model, self.sites, spec=self.trainer_spec)
        if self.ranks.size > 1:
            shard(self.model, self.layout, self.ranks)
            self.sites.weights.manage()
        self.optimizer = MasterAdamW(self.model.named_parameters(), config.optimizer, config.optimizer_steps)
        if saved is not None:
            self._resume(saved)
        temperature = config.sampling.temperature
        reference = None if start is None else Reference(start, self.layout, self.trainer_spec, temperature)
        self.updater = Updater(self.model, self.sites, self.optimizer, config, reference, self.ranks)

    def _make_engine(self) -> None:
        """Build the engine for the current plan, with the trainer's weights."""
        config = self.config
        self.guided_shapes = () if self.plan is None else self.plan.select(self.shapes, self.layout.num_layers)
        self.engine = make_engine(
            config.engine,
            model=unbound_copy(self.model, self.sites, self.trainer_spec),
            tokenizer=self.tokenizer,
            spec=self.rollout_spec,
            plan=self.plan,
            store=self.store,
            settings=config.rollout,
        )

    def _record(self, plan: Plan) -> None:
        """Let the engine record another plan: it is built anew, which costs what starting it costs."""
        if plan != self.plan:
            self.plan = plan
            self.engine.close()
            self._make_engine()
            self.sync()

    def describe(self, say: Callable[[str], None]) -> None:
        """Say what this run is; see :func:`tracefp4.rl.description.describe_run`."""
        describe_run(self, say)

    @torch.no_grad()
    def trainer_coverage(self) -> Coverage:
        """What the trainer quantizes, watched during one short forward."""
        ids = torch.arange(8, device=self.device)[None] + 1
        with probe(self.model) as calls:
            self.model(input_ids=ids, use_cache=False)
        return coverage(self.model, self.trainer_spec, calls)

    def close(self) -> None:
        """Release the engine, which may be processes of their own; again is harmless."""
        self.engine.close()

    # The loop -------------------------------------------------------------------------------------------------------

    def train(self, on_step: Callable[[int, dict[str, Any]], None], stop: Callable[[], bool] = lambda: False) -> None:
        """Run the remaining steps, evaluate, and write everything to the run's folder.

        Args:
            on_step: called with each finished step and its metrics.
            stop: asked between steps; when true on any rank, a checkpoint is written and the loop ends.
        """
        config, journal = self.config, self._journal()
        try:
            self._loop(journal, on_step, lambda: self.ranks.any(stop()))
            if config.train.save_final:
                self.save()
            elif self.step < config.steps:
                self.note(f"stopped at step {self.step} without a checkpoint: train.save_final is false")
        finally:
            journal.close()
            self.task.close()

    def _journal(self) -> Journal:
        config = self.config
        if not self.ranks.first:
            return NoJournal()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        write_bases(self.model, self.layout, self.folder / FILE)
        if self.step == 0 and (self.folder / "metrics.jsonl").exists():
            self.note(f"{self.folder} holds a run without a checkpoint; it starts anew and its record is replaced")
        tracker = make_tracker(config.tracker, self.folder, config.model_dump(mode="json"))
        return Journal(self.folder, tracker, from_step=self.step)

    def _loop(self, journal: Journal, on_step: Callable[[int, dict[str, Any]], None], stop: Callable[[], bool]) -> None:
        config = self.config
        self.sync()
        if self.step == 0:
            self._evaluate(journal)
        deadline = time.monotonic() + 60 * config.max_minutes if config.max_minutes else float("inf")
        while self.step < config.steps and not stop():
            metrics = self.run_step(journal)
            journal.metrics(self.step, metrics)
            on_step(self.step, metrics)
            self.step += 1
            over = self.step == config.steps or self.ranks.any(time.monotonic() >= deadline)
            if over or (config.eval.every and self.step % config.eval.every == 0):
                self._evaluate(journal)
            if over:
                break
            if config.train.checkpoint_every and self.step % config.train.checkpoint_every == 0:
                self.save()

    def run_step(self, journal: Journal) -> dict[str, Any]:
        """One step of RL; returns its metrics."""
        config, clock, ranks = self.config, Clock(), self.ranks
        choosing = self.budget is not None and self.step % config.train.replan_every == 0
        if choosing:
            with clock("plan"):
                self._record(LARGEST)
        share, label = ranks.share(config.train.prompts), f"step-{self.step}"
        items = self.task.items("train", config.train.prompts, (config.seed, "step", self.step))[share]
        sampling = sampling_params(config, top_logprobs=self.top_logprobs)
        samples = config.train.samples
        requests = make_requests(items, self.prompter, sampling, samples, config.seed, label, share.start)
        self.store.counts()  # An engine may have looked at frames of its own, to check itself.
        with clock("rollout"):
            rollouts = self.engine.generate(requests, guidance=self.plan is not None)
        repeated = [item for item in items for _ in range(samples)]
        with clock("reward"):
            before = self.task.counts.copy()
            texts, rewards = score(rollouts, repeated, self.task, self.prompter.decode)
            unscored = ranks.merge(self.task.counts - before)
        store = self.store if self.plan is not None else None
        experience = digest_experience(rollouts, repeated, texts, rewards, config, store, ranks)
        size = sum(shape.values for shape in self.guided_shapes)
        chosen = None
        if choosing:
            with clock("plan"):
                chosen = self._choose(experience)
        self.backlog.append(experience)
        ready = self.backlog.popleft() if len(self.backlog) > config.train.lag else None
        with clock("train"):
            trained = {} if ready is None else self._update(ready)
        with clock("sync"):
            for handle in ready.handles() if ready is not None else ():
                self.store.delete(handle)
            self.version += 1
            sent = -self.engine.stats.sync_bytes
            self.sync()
            sent += self.engine.stats.sync_bytes
        if chosen is not None:
            with clock("plan"):
                self._record(chosen)
        for i in experience.telling(samples):
            journal.sample(self.step, experience.sample(i, self.prompter.decode))
        seconds = clock.metrics()
        (tokens,) = ranks.sum([sum(len(r.response_ids) for r in rollouts)])
        return {
            **experience.metrics,
            **{f"reward/{cause}": float(count) for cause, count in sorted(unscored.items())},
            **trained,
            **guidance_size(rollouts, size, self.store.counts(), ranks),
            **seconds,
            "throughput/rollout_tok_s": tokens / max(seconds["time/rollout_s"], 1e-9),
            "throughput/train_tok_s": trained.get("train/tokens", 0.0) / max(seconds["time/train_s"], 1e-9),
            "sync/bytes": sent,
            "weight_version": self.version,
        }

    def _choose(self, experience: Experience) -> Plan | None:
        """The plan for the next steps, measured on this step's samples; ``None`` if none of them trains anything."""
        load = self._loader(experience.rollouts)
        examples = spread(experience.examples, self.config.train.samples)
        if load is None or self.budget is None or not examples:
            return None
        rollouts = [experience.rollouts[example.index] for example in examples]
        choice = choose_measured(
            self.model, self.sites, self.shapes, rollouts, load(examples), self.budget,
            temperature=self.config.sampling.temperature, micro_tokens=self.config.train.micro_tokens,
            pulls=self.config.engine == "embedded",
        )  # fmt: skip
        self.note(f"step {self.step}: {choice}")
        return choice.plan

    def _update(self, experience: Experience) -> dict[str, float]:
        if not self.ranks.any(bool(experience.examples)):
            return {}
        every = self.config.train.unguided_every
        unguided = every > 0 and self.step % every == 0
        # Guidance of old weights holds the trainer to a policy that it has left, and hides from the correction how far.
        age = self.version - min(rollout.weight_version for rollout in experience.rollouts)
        load = self._loader(experience.rollouts) if age <= self.config.train.guided_lag else None
        return self.updater.update(experience.examples, load, measure_unguided=unguided)

    def sync(self) -> None:
        """Push the trainer's weights to the engine, as ``rollout.refit`` says, and prove that both serve the same."""
        spec = self.rollout_spec
        state = sent_weights(self.config, self.model, self.layout, spec)
        digest = self.engine.sync(state, self.version)
        mine = model_digest(self.model, self.layout, spec.weights, state, self._digest, spec.bf16_layers)
        if digest != mine:
            raise SyncError(f"weights differ after sync {self.version}: engine {digest}, trainer {mine}")

    def _loader(self, rollouts: list[Any]) -> GuidanceSource | None:
        if self.plan is None:
            return None
        expect = Expectation(
            numerics_hash=self.rollout_spec.hash,
            plan=str(self.plan),
            shapes=self.guided_shapes,
            weight_version=self.version,
            max_lag=max(self.config.train.max_lag, self.config.train.guided_lag),
        )
        return GuidanceSource(self.store, rollouts, expect)

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
            decode=self.prompter.decode,
            ranks=self.ranks,
        )
        metrics = found.metrics(self.task.name)
        journal.metrics(self.step, metrics)
        journal.evaluation(self.step, found.by_item())
        self.note(f"step {self.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in metrics.items() if isinstance(v, float)))

    def save(self) -> Path:
        """Write a checkpoint of the current step; the first rank writes, the others hand it their shards."""
        plan, start = "" if self.plan is None else str(self.plan), self.start.name
        steps, identity, spec = self.optimizer.steps, self._identity(), self.config.spec
        state = checkpoint.TrainState(self.step, self.version, steps, identity, plan, start, spec)
        root, model, optimizer = self.folder / "checkpoints", weights(self.model), self.optimizer.state()
        if not self.ranks.first:
            checkpoint.attend(model, optimizer)
            return root
        folder = checkpoint.save(root, model, optimizer, state, self.config.train.keep_checkpoints)
        self.note(f"checkpoint {folder}")
        return folder

    def _resume(self, saved: checkpoint.Saved) -> None:
        self.start = self.start.of(saved.state.warm_start, needed=self.config.loss.kl > 0)
        self.optimizer.load(saved.optimizer, saved.state.optimizer_steps)
        self.step, self.version = saved.state.step, saved.state.weight_version
        self.note(f"resumed from {saved.folder}")

    def _identity(self) -> str:
        return f"{config_hash(self.config)}-{self.start.inputs}"
