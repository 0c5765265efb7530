"""Defines the job of `gpurun train`: the bundled trainer, or the user's modified copy of it, on shards of tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from gpurun import __version__
from gpurun.core.artifact_names import path_of
from gpurun.core.installed_files import bundle_root
from gpurun.core.job_terms import TRAINER, JobTerms
from gpurun.core.records import digest_json
from gpurun.core.run_plan import Job, Leg, Mode, Plan, Workload
from gpurun.core.untrusted import read_object
from gpurun.view.number_format import format_count, short_hash

CHANGED = "changed trainer"
CONTINUED = "continue"
"""The folder beside the shards with the checkpoint from which the trainer continues."""
CHECKPOINT_BYTES = 12  # Per parameter: fp32 weights and AdamW's two moments.
KEPT_CHECKPOINTS = 2  # The latest and the best checkpoint, which are downloaded at the end.
SAVE_START_S = 60  # Time to end a step and begin to save before the trainer is killed.
SAVE_BYTES_PER_S = 80e6  # The assumed rate of writing a checkpoint; 86 MB/s was measured on two busy cores.
TRIAL_CHECKPOINTS = 4  # A running trial has three checkpoints on disk while it writes a fourth.
# Sizes that do not follow from the model.
SLACK_BYTES, SAMPLE_BYTES, COMPILE_CACHE_BYTES = 16 << 20, 256 << 10, 1 << 30


class TrainerJob(Job):
    """A recipe for the trainer. `resolved` is the whole recipe; `parameters` is the model's size with the plan's data.

    `trainer` is "official trainer 0.1.0" (with the version) or "changed trainer"; it is empty in plans of older
    versions.
    """

    kind: ClassVar[str] = "trainer"
    terms: ClassVar[JobTerms] = TRAINER
    sends_itself: ClassVar[bool] = False

    form: Literal["full", "rehearsal"]
    resolved: dict[str, Any]
    parameters: int

    @property
    def needs_torch(self) -> bool:
        """See `Job.needs_torch`."""
        return True

    @property
    def steps(self) -> int:
        """See `Job.steps`."""
        train = self.resolved.get("train")
        steps = train.get("steps") if isinstance(train, dict) else 0
        return steps if isinstance(steps, int) else 0

    @property
    def challenge(self) -> str:
        """See `Job.challenge`."""
        return str(self.resolved.get("train", {}).get("challenge", ""))

    @property
    def disk_gb(self) -> int:
        """See `Job.disk_gb`."""
        return int(self.resolved["hardware"]["disk_gb"])

    @property
    def checkpoint_bytes(self) -> int:
        """See `Job.checkpoint_bytes`."""
        return CHECKPOINT_BYTES * self.parameters

    @property
    def can_resume(self) -> bool:
        """See `Job.can_resume`."""
        return True

    @property
    def checkpoint_every(self) -> int:
        """See `Job.checkpoint_every`."""
        every = self.resolved.get("train", {}).get("checkpoint_every", 0)
        return every if isinstance(every, int) else 0

    @property
    def more_kept(self) -> int:
        """See `Job.more_kept`; 0 for plans of older versions, which lack the key."""
        return int(self.resolved.get("train", {}).get("keep_checkpoints", 0))

    @property
    def home_bytes(self) -> int:
        """See `Job.home_bytes`."""
        return (KEPT_CHECKPOINTS + self.more_kept) * self.checkpoint_bytes

    @property
    def save_s(self) -> int:
        """See `Job.save_s`."""
        return SAVE_START_S + int(self.checkpoint_bytes / SAVE_BYTES_PER_S)

    def most_bytes(self, kind: str) -> int | None:
        """Return the byte limit of one file of a kind, about twice its expected size; None if that is unknown."""
        if not self.parameters:
            return None
        tokens = int(self.resolved.get("sample", {}).get("tokens", 0))
        return {
            "weights": SLACK_BYTES + 2 * 4 * self.parameters,
            "optimizer": SLACK_BYTES + 2 * 8 * self.parameters,
            "sample": SAMPLE_BYTES + 256 * tokens,
            "compile_cache": COMPILE_CACHE_BYTES,
        }.get(kind, SLACK_BYTES)

    def workload(self, plan: Plan, trainer: Path, cpus: int) -> Workload:
        """See `Job.workload`."""
        recipe = json.dumps(self.resolved, indent=2, sort_keys=True).encode()
        modules = {f"bundle/trainer/{name}": path for name, path in modules_of(trainer).items()}
        uploads = {**modules, "bundle/recipe.json": recipe, **self._data_uploads(plan)}
        return Workload(self._command_words(plan), uploads, _environment_variables(plan, cpus))

    def digest(self, plan: Plan, trainer: Path) -> str:
        """See `Job.digest`."""
        return digest_of_trainer(trainer)

    def shipped(self, digest: str) -> Self:
        """Return the job with its trainer's name, which follows from the trainer's digest."""
        return self.model_copy(update={"trainer": words_of_trainer(digest)})

    def opened(self) -> dict[str, Any]:
        """Return {}: a training run adds no fields to the journal's first record."""
        return {}

    def flat(self) -> dict[str, Any]:
        """Return the keys that this job adds to the top level of plan.json."""
        return {**self.model_dump(mode="json"), "command": None}

    def headline(self) -> list[str]:
        """See `Job.headline`."""
        shrunk = ", shrunk by its [rehearsal] table" if self.form == "rehearsal" else ""
        parts = [self.recipe, f"{format_count(self.parameters)} parameters{shrunk}"]
        train: dict[str, Any] = self.resolved.get("train", {})
        steps, batch = train.get("steps"), train.get("batch_tokens")
        if isinstance(steps, int) and isinstance(batch, int):
            parts.append(f"{format_count(steps * batch)} tokens in {steps:,} steps".replace(",", " "))
        return parts

    def trial_order(self, workload: Workload) -> dict[str, Any]:
        """Return the settings that a sweep's runner needs to start each trial, in a folder of the trial's own."""
        argv = ["{out}" if word == "../out" else word for word in workload.argv]
        none: dict[str, Any] = {"outputs": (), "total_steps": 0, "executable": ()}
        return {"is_recipe": True, "argv": argv, "stop_signal": "TERM", **none}

    def earlier_sweep_uploads(self, plan: Plan) -> dict[str, Path | bytes]:
        """Return {}: the earlier sweep's results are uploaded with the shards."""
        return {}

    def trials_save_s(self, at_once: int) -> int:
        """Return the seconds that trials have to save when all are stopped together. They share one disk."""
        return at_once * self.save_s

    def trials_bytes(self, at_once: int, keep: int) -> int:
        """Return the disk bytes for the checkpoints of the other running trials, and of the best trials."""
        return ((at_once - 1) * TRIAL_CHECKPOINTS + keep * KEPT_CHECKPOINTS) * self.checkpoint_bytes

    def kept_bytes(self, keep: int) -> int:
        """Return the bytes to download for the best trials."""
        return keep * self.home_bytes

    def with_settings(self, params: Mapping[str, str]) -> Self:
        """Return the job that trains one trial, with these settings, as a stand-alone run."""
        from gpurun.core.installed_files import recipe, recipe_file

        sets = [recipe_file.parse_override(f"{name}={value}") for name, value in params.items()]
        whole = recipe.parse_recipe(self.resolved, is_whole=False)
        resolved = recipe_file.laid_over(whole, sets, rehearse=False)
        resolved.pop("rehearsal", None)
        return self.model_copy(update={"resolved": resolved, "recipe_sha256": digest_json(resolved)})

    def cargo(self, plan: Plan) -> tuple[list[str], list[str]]:
        """See `Job.cargo`."""
        data = plan.data
        digests = [
            f"data {short_hash(data.sha256)}",
            f"{self.trainer or 'trainer'} {short_hash(plan.bundle_sha256)}",
        ]
        if data.train_tokens:
            return [data.source, f"{format_count(data.train_tokens)} tokens ({data.tokenizer})"], digests
        return [f"{data.source}, {data.tokenizer}"], digests

    def _command_words(self, plan: Plan) -> tuple[str, ...]:
        """Return the command that starts the plan's processes, with the micro-batch that fits according to the plan.

        Without it, the trainer would have to find the micro-batch by running out of memory, on paid time.
        """
        from gpurun.remote.client import EACH_NODE, TORCHRUN

        start: tuple[str, ...] = ("{python}", "-m")
        program = ["trainer.launch", f"--processes={plan.processes}"] if plan.processes > 1 else ["trainer.train"]
        if plan.offer.nodes > 1:
            start = ("sh", f"../{EACH_NODE[0]}", *EACH_NODE[1:], "{python}", "-m")
            program = [TORCHRUN, f"--nproc-per-node={plan.offer.processes_per_node}", "-m", "trainer.train"]
        paths = ["--recipe", "recipe.json", "--data", "../data", "--out", "../out"]
        fits, train = plan.estimate.micro_batch, self.resolved["train"]
        cut = [f"--micro-batch={fits}"] if 0 < fits < train["micro_batch"] else []
        # Without the flag the trainer decides, as with older plans, which do not contain this decision.
        shared = ["--parallel=fsdp"] if plan.estimate.sharded and train["parallel"] == "auto" else []
        return (*start, *program, *paths, *cut, *shared)

    def _data_uploads(self, plan: Plan) -> dict[str, Path | bytes]:
        """Return the data to upload: the run's own folder, and the shards and weights in the user's folder.

        The manifest is the run's own copy, because the user may move or rebuild the folder before the upload.
        """
        from gpurun.jobs.training.initial_weights import weights_of

        folder, name = Path(plan.data.folder), self.resolved["train"].get("init_from")
        if plan.leg is not None and plan.leg.files:
            own = Path(plan.data.beside or folder)
            rest = self._data_uploads(plan.model_copy(update={"leg": None}))
            # The run's own newest checkpoint replaces the checkpoint of an earlier run.
            beside = {f"data/{path.name}": path for path in own.iterdir() if path.name != CONTINUED}
            files = {place: path for place, path in rest.items() if place != "data"}
            caches = [file.name for file in plan.leg.caches_for(plan.offer) if not (own / file.name).exists()]
            warm = {f"data/{name}": path_of(Path(plan.leg.folder), name) for name in caches}
            return {**files, **beside, **warm, **_checkpoint_of(plan.leg)}
        if not plan.data.beside:
            return {"data": folder}
        manifest = read_object(Path(plan.data.beside) / "data.json")
        shards = [Path(str(shard["name"])).name for part in ("train", "val") for shard in manifest[part]]
        files = {shard: folder / shard for shard in shards}
        if name and plan.continues is None and not (Path(plan.data.beside) / name).is_dir():
            files |= weights_of(folder, name)
        return {**{f"data/{place}": path for place, path in files.items()}, "data": Path(plan.data.beside)}


def _checkpoint_of(leg: Leg) -> dict[str, Path | bytes]:
    """Return the checkpoint that a leg starts from, at the place where the trainer looks for a checkpoint."""
    entries = [file.model_dump(mode="json") for file in leg.files]
    manifest = {"v": 1, "latest": leg.step, "best": None, "files": entries}
    files = {f"data/{CONTINUED}/{file.name}": path_of(Path(leg.folder), file.name) for file in leg.files}
    return {**files, f"data/{CONTINUED}/MANIFEST.json": json.dumps(manifest, indent=1).encode() + b"\n"}


def _environment_variables(plan: Plan, cpus: int) -> dict[str, str]:
    """Return the environment variables that the trainer needs in addition to the machine's own."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if plan.processes > 1 or plan.lease.queue_s:
        # By default torchrun gives each process only one thread, and on a cluster other jobs may share the node.
        variables["OMP_NUM_THREADS"] = str(max(1, cpus // (plan.processes // plan.offer.nodes)))
    if plan.mode is not Mode.PAID:
        # Other programs run on this computer, so a spinning thread can take the core that another thread needs. On a
        # rented machine threads may spin, because waking a thread can take longer than its part of a small step.
        variables |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return variables


def modules_of(trainer: Path) -> dict[str, Path]:
    """Return the files of the trainer's modules, keyed by their path in the package."""
    return {path.relative_to(trainer).as_posix(): path for path in sorted(trainer.rglob("*.py"))}


def digest_of_trainer(trainer: Path) -> str:
    """Return one digest over the names and texts of a trainer's modules."""
    return digest_json({name: path.read_text(encoding="utf-8") for name, path in modules_of(trainer).items()})


def words_of_trainer(digest: str) -> str:
    """Return the trainer's name for plan, journal and receipt. An unmodified copy counts as the official trainer."""
    official = digest == digest_of_trainer(bundle_root() / "trainer")
    return f"official trainer {__version__}" if official else CHANGED
