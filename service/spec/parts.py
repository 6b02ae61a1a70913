"""The parts of a job other than its algorithm. A default lives here, once, on its field."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from service.spec.base import SpecModel

EnvironmentId = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9_]+(/[a-z0-9_]+)+$", max_length=128)
]
DecodingMode = Literal["sampled", "greedy"]
StorageUrl = Annotated[
    str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\x00]{0,1000})?$")
]
RowsLocation = Annotated[
    str,
    StringConstraints(
        pattern=r"^(file-[a-z0-9]{16,32}|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]/[^\x00]{1,1000}"
        r"|/[^\x00]{1,4000})$"
    ),
]
TooLong = Literal["refuse", "drop", "truncate-left", "truncate-right"]
"""What becomes of a row of more than `training.max_length` tokens."""
Strings = Literal["chat", "plain"]
JobReference = Annotated[
    str,
    StringConstraints(pattern=r"^job:[a-z0-9][a-z0-9-]{0,62}@(latest|[0-9]{1,9})$"),
]


class InitialModel(SpecModel):
    """A new model with random weights."""

    config: dict[str, Any]
    """A Hugging Face model config, as in config.json, of a supported family (`model_type`)."""
    tokenizer: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder with the tokenizer's files, under one of the service's model roots."""


class ModelSource(SpecModel):
    """Where the weights come from: exactly one of the three."""

    from_job: JobReference | None = Field(default=None, alias="from")
    """A checkpoint of another job: `job:NAME_OR_ID@latest` or `job:NAME_OR_ID@STEP`."""
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Folder with a Hugging Face model, under one of the service's model roots."""
    init: InitialModel | None = None
    """Random weights from a config (seeded by `training.seed`)."""

    @model_validator(mode="after")
    def _exactly_one(self) -> "ModelSource":
        if sum(source is not None for source in (self.from_job, self.path, self.init)) != 1:
            raise ValueError("give exactly one of `from`, `path` and `init`")
        return self


class EnvironmentRef(SpecModel):
    """An environment from the registry, and how it is set up."""

    id: EnvironmentId
    """Name in the registry; `GET /v1/environments` lists them."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Version in the registry; null takes the newest and stores which one that was."""
    max_turns: Annotated[int, Field(ge=1, le=256)] | None = None
    """Assistant turns after which an episode is cut; null takes the environment's own bound."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The environment's own settings, checked against its schema at submit."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of the training questions. Held-out ones have `evaluation.seed`."""


class DataSpec(SpecModel):
    """Training rows for offline algorithms."""

    train: RowsLocation
    """Rows, as JSONL, a JSON array or Parquet: the id of an uploaded file (`POST /v1/files`),
    `s3://BUCKET/KEY`, or an absolute path under one of the service's data roots."""
    validation: RowsLocation | None = None
    """Rows whose loss is measured at each evaluation; named as `train`."""
    shuffle_seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of each epoch's order of rows."""
    too_long: TooLong = "refuse"
    """What happens to a row of more than `training.max_length` tokens."""
    strings: Strings = "chat"
    """What a prompt and its answer that are strings become: a user's and an assistant's message of
    the chat template, or plain text that ends with the end-of-sequence token."""


class ParallelSpec(SpecModel):
    """How the model is spread over the ranks: tp x cp x pp x dp of them."""

    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor parallelism: each layer's matrices over this many ranks."""
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline parallelism: the layers in this many stages."""
    vpp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Virtual pipeline stages on each rank: the layers in pp x vpp chunks, and a shorter bubble."""
    pipeline_layers: list[Annotated[int, Field(ge=1)]] | None = None
    """Layers of each of the pp stages, first to last; null spreads them evenly, longer ones first.
    """
    cp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Context parallelism: each sequence over this many ranks."""
    ep: Annotated[int, Field(ge=1, le=1024)] = 1
    """Expert parallelism: the experts of a mixture over this many of the dp x cp ranks."""
    dp: Annotated[int, Field(ge=1, le=65536)] | Literal["auto"] = "auto"
    """Data parallelism, with the optimizer state sharded; `auto` fills the machines."""
    sequence_parallel: bool = False
    """Split norms and activations between tensor-parallel layers along the sequence; needs tp > 1.
    """


class RolloutLayout(SpecModel):
    """The generator's layout; the ranks left over hold data-parallel copies."""

    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor parallelism of the generation model."""


class RolloutSpec(SpecModel):
    """How online algorithms and evaluations sample."""

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Tokens at most in one assistant turn."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Divides the logits, in sampling and in the trainer's log-probs alike."""
    layout: RolloutLayout = RolloutLayout()
    """Layout of the generation copy of the model, on the same ranks as training."""
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of a step's episodes that may fail in the environment before the job fails."""
    episode_timeout_seconds: Annotated[float, Field(gt=0)] = 300.0
    """An environment call that takes longer counts as a failed episode."""


class Fp8Spec(SpecModel):
    """A recipe of Transformer Engine; needs `dtype` bf16 or fp16, and GPUs that can do it. Without
    GPUs its numbers are emulated."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "blockwise"
    """How scales are chosen: from a history of maxima, of each tensor now, of blocks of 128, or of
    blocks of 32 with scales of their own format (Blackwell)."""
    format: Literal["e4m3", "hybrid"] = "hybrid"
    """E4M3 everywhere, or E4M3 forward and E5M2 for gradients."""
    amax_history: Annotated[int, Field(ge=1, le=65536)] = 1024
    """`delayed`: how many steps of maxima are kept."""
    amax_compute: Literal["max", "most_recent"] = "max"
    """`delayed`: which of them sets the scale."""
    margin: Annotated[int, Field(ge=0, le=64)] = 0
    """`delayed`: the scale is lowered by 2 to this power."""
    first_last_bf16_layers: Annotated[int, Field(ge=0, le=1024)] = 0
    """How many layers at each end stay in `dtype`."""
    params_in_fp8: bool = False
    """Keep weights in 8 bits between steps; the optimizer holds them in fp32 anyway."""


class PrecisionSpec(SpecModel):
    """Number formats of training."""

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Format of weights and activations; the optimizer keeps fp32 in all. fp16 scales the loss."""
    fp8: Fp8Spec | None = None
    """Matrix products in 8 bits by Transformer Engine; null computes them in `dtype`."""


class OptimizerSpec(SpecModel):
    """AdamW and its schedule."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    learning_rate: Annotated[float, Field(gt=0, lt=10)] = 1e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, over `training.steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where a falling schedule ends, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decoupled weight decay."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.95], min_length=2, max_length=2
    )
    """Decay rates of the two moments."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0 clips nothing."""
    offload: bool = False
    """Keep moments and fp32 weights in the machine's memory and update there; saves GPU memory."""


class TrainingSpec(SpecModel):
    """How long and in which batches."""

    steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps (rollout steps for online algorithms, which need it); null means `epochs`."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Passes over the data, where `steps` is null."""
    global_batch_size: Annotated[int, Field(ge=1, le=10_000_000)] = 64
    """Rows of one step, over all ranks: sequences, or pairs of a chosen and a rejected answer;
    online: questions x group size."""
    micro_batch_size: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"] = "auto"
    """Sequences of one forward pass on one rank; `auto` fills `micro_batch_tokens`."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 16384
    """Tokens at most of one forward pass on one rank, where `micro_batch_size` is `auto`; a single
    longer sequence goes alone."""
    packing: bool = True
    """Lay the sequences of a forward pass end to end, without padding; none sees its neighbour."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again: none, those of core attention, or all of
    each layer's. Less memory for more time."""
    max_length: Annotated[int, Field(ge=2, le=10_000_000)] = 2048
    """Longest sequence in tokens, prompt and answers together."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of weights, sampling and dropout."""

    @property
    def fixed_micro_batch_size(self) -> int | None:
        """Sequences of one forward pass; None where `micro_batch_tokens` decides."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size


class BestSpec(SpecModel):
    """What makes a checkpoint the best: a number of its step's `evaluation` event."""

    metric: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}(/[a-z0-9_]{1,64})?$")]
    """Name of the number: `accuracy`, `reward_mean`, `loss`, ...; `MODE/NAME` takes it from the
    evaluation of that mode (`greedy/accuracy`), a bare name from the first that has it."""
    higher_is_better: bool = True
    """False for losses. Of equal ones the newest is the best."""


class CheckpointSpec(SpecModel):
    """When the state is saved."""

    every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between checkpoints; null saves at the end only."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay on disk."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Checkpoints of steps that this divides stay too; null keeps none of them."""
    keep_best: BestSpec | None = None
    """The best checkpoint by an evaluation stays too; null keeps none for that."""
    async_save: bool = False
    """Train on while a process of its own writes; a checkpoint counts once it is published."""
    save_retries: Annotated[int, Field(ge=0, le=100)] = 2
    """How often a save that failed (a full disk, a quota, the network) is tried again at once."""
    max_missed: Annotated[int, Field(ge=0, le=1000)] = 3
    """Saves in a row that may fail, each with a `warning` event, before the job does."""
    storage: StorageUrl | None = None
    """`s3://BUCKET/PREFIX`: published checkpoints are copied there, and a job whose folder has
    none goes on from there; null keeps them in the job's folder only."""
    export: bool = True
    """At the end, also write Hugging Face weights."""
    verify_export: bool = True
    """Load what was exported with transformers and compare its logits with Megatron's."""


class EvaluationSpec(SpecModel):
    """Held-out episodes: no question of theirs is trained on."""

    environment: EnvironmentRef | None = None
    """The environment to evaluate in; null takes the job's own."""
    every_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations; null evaluates only at start and end."""
    at_start: bool = True
    """Evaluate before the first step too."""
    items: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How many held-out questions; 0 evaluates nothing in an environment."""
    samples_per_item: Annotated[int, Field(ge=1, le=1024)] = 1
    """Sampled answers to each question; more than one also give `pass_at_<k>`. A greedy answer is
    given once."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1_000_003
    """Seed of the held-out questions."""
    modes: list[DecodingMode] = Field(default=["sampled", "greedy"], min_length=1)
    """Sampled at `rollout.temperature`, greedy, or both."""


class ResumeSpec(SpecModel):
    """Going on with another job: its weights, optimizer, counters and place in the data."""

    job: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Name or id of the job to go on with."""
    step: Annotated[int, Field(ge=0, lt=10**9)] | Literal["latest"] = "latest"
    """Which of its checkpoints; `latest` is resolved, and stored, at submit."""
    layout: ParallelSpec | None = None
    """Another name for the job's `parallel`: the layout to go on with."""
