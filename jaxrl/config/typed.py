"""Types of a resolved config's options, by group, for type checkers and editors: nothing is made of them.

Written by `python -m jaxrl.config.generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from ml_collections import ConfigDict


class Group:
    """Options of one group, as attributes and as items. Those of a Config may be changed."""

    def __getitem__(self, name: str) -> Any: ...
    def __setitem__(self, name: str, value: Any) -> None: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, name: object) -> bool: ...
    def get(self, name: str, default: Any = None) -> Any: ...
    def keys(self) -> Any: ...
    def items(self) -> Any: ...
    def values(self) -> Any: ...
    def update(self, *others: Any, **values: Any) -> None: ...
    def unlocked(self) -> AbstractContextManager: ...


class Run(Group):
    recipe: str
    mode: str
    dir: str
    seed: int
    resume: str
    accept_changed: tuple[str, ...]
    stop_seconds: float
    warm_start: str
    compile_cache: str
    compile_cache_gb: float
    deterministic: bool
    matmul_precision: str


class Model(Group):
    path: str
    revision: str | None
    trust_remote_code: bool
    tokenizer_revision: str | None
    init: str
    config: Any
    tokenizer: str
    chat_template: str
    pad_token: str
    eos_tokens: tuple[str, ...]
    scan_layers: str
    remat: str
    remat_every: int
    attention: str
    ring_attention: bool
    experts: str
    recurrence: str
    trainable: tuple[str, ...]
    frozen: tuple[str, ...]


class Lora(Group):
    rank: int
    alpha: float | None
    dropout: float
    targets: tuple[str, ...]
    exclude: tuple[str, ...]
    layers: tuple[int, ...]
    rslora: bool
    dora: bool
    rank_pattern: tuple[str, ...]
    alpha_pattern: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    init: str
    path: str
    publish: str
    export: str
    adapters: Any
    base_dtype: str
    base: str


class Mesh(Group):
    dp: int
    fsdp: int
    cp: int
    ep: int
    tp: int
    roles: Any


class Data(Group):
    path: tuple[str, ...]
    subset: str
    split: tuple[str, ...]
    revision: str | None
    sources: Any
    exhausted: str
    prompt_column: str
    answer_column: str
    answer_pattern: str
    completion_column: str
    chosen_column: str
    rejected_column: str
    label_column: str
    margin_column: str
    train_turns: str
    assistant_mask: str
    image_column: str
    image_marker: str
    image_root: str
    image_min_pixels: int | None
    image_max_pixels: int | None
    max_images: int
    image_decode_limit: int
    video_column: str
    video_fps: float | None
    video_max_frames: int | None
    video_max_pixels: int | None
    system_prompt: str
    chat: str
    add_generation_prompt: bool
    chat_template_kwargs: Any
    response_prefix: str
    prompts_per_step: int
    max_prompt_tokens: int
    overlong_prompt: str
    overlong_completion: str
    difficulty: str
    difficulty_window: tuple[str, ...]
    pass_rate_min: float
    pass_rate_max: float
    epochs: int
    shuffle: bool
    seed: int | None
    max_rows: int
    eval_fraction: float
    bad_rows: str
    cache: str
    workers: int
    prefetch: int
    drop_last: bool


class Rollout_Vllm(Group):
    replicas: int
    tensor_parallel: int
    devices: tuple[str, ...]
    memory_fraction: float
    max_model_len: int
    max_running: int
    max_requests: int
    prefix_caching: bool
    chunked_prefill: bool
    engine_kwargs: Any
    env: Any
    python: str
    host: str
    port: int
    api_key: str
    transport: str
    weights_host: str
    chunk_mb: int
    setup_seconds: float
    request_seconds: float
    sync_seconds: float
    health_seconds: float
    retries: int
    restarts: int
    probe_bound: float
    log_level: str


class Rollout(Group):
    engine: str
    group_size: int
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    penalties_in_training: bool
    stop: tuple[str, ...]
    keep_stop: bool
    stop_token_ids: tuple[int, ...]
    slots: int
    prompt_lengths: tuple[int, ...]
    cache_lengths: tuple[int, ...]
    compaction: bool
    decode_steps: int
    dtype: str
    timeout_seconds: float
    max_staleness: int
    sync_every: int
    partial: bool
    servers: tuple[str, ...]
    placement: str
    seeded: str
    verify_weights: str
    vllm: Rollout_Vllm


class Env(Group):
    function: str
    tools: tuple[str, ...]
    program: str
    score: str
    crash: str
    train_calls: str
    mcp: tuple[str, ...]
    mcp_session: str
    servers: tuple[str, ...]
    options: Any
    parser: str
    history: str
    observations: str
    workers: int
    executor: str
    ray_address: str
    ray_cpus: float
    threads: bool
    python: str
    variables: tuple[str, ...]
    memory_gb: float
    in_flight: int
    max_turns: int
    max_sampled_tokens: int
    max_input_tokens: int
    max_observation_tokens: int
    image_tokens: int
    max_parallel_calls: int
    step_seconds: float
    episode_seconds: float
    retries: int
    late: str
    max_failed_fraction: float
    resume: str
    publish: str
    malformed_penalty: float


class Sandbox(Group):
    backend: str
    paths: tuple[str, ...]
    url: str
    api: str
    key_env: str
    retries: int
    seconds: float
    cpu_seconds: float
    memory_mb: int
    disk_mb: int
    output_bytes: int
    processes: int


class Reward_Model(Group):
    path: str
    revision: str | None
    head: str
    weight: float
    dtype: str
    render: str
    max_sequence_tokens: int


class Reward_Remote(Group):
    servers: tuple[str, ...]
    format: str
    key_env: str
    batch: int
    concurrency: int
    deadline_seconds: float
    retries: int
    columns: tuple[str, ...]
    score_key: str
    functions: tuple[str, ...]
    weights: tuple[float, ...]
    part_min: float | None
    part_max: float | None
    clip_min: float | None
    clip_max: float | None
    scale: float
    fetch_url: str
    language: str
    model: str
    task: str


class Reward_Judge(Group):
    servers: tuple[str, ...]
    model: str
    key_env: str
    prompt_file: str
    rubric: str
    rubric_column: str
    show_images: bool
    pattern: str
    words: Any
    lowest: float
    highest: float
    max_new_tokens: int
    concurrency: int
    deadline_seconds: float
    retries: int
    extra: Any
    cache: str
    labelled: str
    min_agreement: float
    devices: str
    server_args: Any


class Reward(Group):
    functions: tuple[str, ...]
    weights: tuple[float, ...]
    column: str
    format_pattern: str
    arguments: Any
    code_score: str
    pass_mark: float
    workers: int
    executor: str
    ray_address: str
    ray_cpus: float
    env: tuple[str, ...]
    trial: bool
    timeout_seconds: float
    memory_gb: float
    recycle: int
    max_failed_fraction: float
    zero_without_end: bool
    scale: float
    bias: float
    clip: float | None
    norm_mean: str
    norm_std: str
    overlong_buffer: int
    overlong_penalty: float
    model: Reward_Model
    remote: Reward_Remote
    remotes: Any
    judge: Reward_Judge
    judges: Any


class RewardModel(Group):
    kind: str
    center: float
    head: str
    steps_column: str
    labels_column: str
    separator: str


class Algorithm_Kl(Group):
    coef: float
    estimator: str
    placement: str


class Algorithm_Mismatch(Group):
    correction: str
    cap: float
    low: float
    sequence_delta: float
    warn: float
    stop: float


class Algorithm(Group):
    preset: str
    advantage: str
    advantage_mean: str
    advantage_std: str
    whiten: bool
    whiten_mean: str
    whiten_std: str
    advantage_low: float
    advantage_high: float
    gamma: float
    lam: float
    lam_alpha: float
    critic_lam: float
    turn_gamma: float
    anchor_coef: float
    policy_loss: str
    ratio: str
    clip_low: float
    clip_high: float
    dual_clip: float
    delta: float
    cispo_max_ratio: float
    cispo_min_ratio: float
    sapo_tau_pos: float
    sapo_tau_neg: float
    dppo_low: float
    dppo_high: float
    m2_threshold: float
    sequence_high: float
    sequence_low: float
    sequence_ratio: str
    cov_share: float
    cov_low: float
    cov_high: float
    temperature: float
    aggregation: str
    aggregation_constant: float
    aggregation_sequences: int
    kl: Algorithm_Kl
    entropy_coef: float
    entropy_target: float
    entropy_rate: float
    entropy_max: float
    positive_nll_coef: float
    dynamic_sampling: str
    dynamic_sampling_rounds: int
    keep_group: str
    shared_prefix_tokens: int
    sampled_support: bool
    routes: str
    early_stop_ratio: float
    early_stop_kl: float
    ppo_epochs: int
    num_minibatches: int
    old_logprobs: str
    mismatch: Algorithm_Mismatch
    mask_truncated: bool
    overlong_buffer_fraction: float


class Preference(Group):
    loss: tuple[str, ...]
    loss_weights: tuple[float, ...]
    beta: float
    label_smoothing: float
    ipo_mean: bool
    simpo_gamma: float
    discopop_tau: float
    desirable_weight: float
    undesirable_weight: float
    rpo_alpha: float


class Critic(Group):
    path: str
    revision: str | None
    head: str
    shared: bool
    coef: float
    lr: float
    optimizer: Any
    value_clip: float
    num_minibatches: int
    warmup_steps: int
    normalize: bool


class Reference(Group):
    path: str
    revision: str | None
    dtype: str
    reset_steps: int
    reset_epochs: float
    reset_optimizer: bool


class Distill(Group):
    loss: str
    beta: float
    top_k: int
    tail: bool
    on_policy: float
    coef: float
    gamma: float
    on_prompt: bool
    ce: float
    temperature: float
    teacher_temperature: float


class Teacher(Group):
    path: str
    revision: str | None
    dtype: str
    servers: tuple[str, ...]
    timeout_seconds: float
    files: str
    save: str


class Optimizer(Group):
    name: str
    lr: float | None
    b1: float
    b2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    schedule: str
    warmup_steps: int
    warmup_fraction: float
    warmup_start: float
    decay_steps: int
    decay_shape: str
    floor: float
    offload: bool
    groups: Any
    layer_decay: float
    max_nonfinite: int


class Train_LossScale(Group):
    initial: float
    min: float
    max: float
    window: int
    patience: int


class Train(Group):
    steps: int | None
    max_samples: int
    image_features: str
    image_cache_gb: float
    tokens_per_microbatch: int
    score_tokens_per_microbatch: int
    row_lengths: tuple[int, ...]
    row_counts: int
    max_sequence_tokens: int
    share_prompts: bool
    compute_dtype: str
    matmul: str
    matmul_emulated: bool
    loss_scale: Train_LossScale
    stop_on_divergence: bool
    max_step_kl: float
    param_dtype: str
    logprob_chunk: int
    loss_on_prompt: bool
    router_balance: float
    router_bias_rate: float
    router_z: float


class Eval(Group):
    sets: tuple[str, ...]
    every_steps: int
    every_epochs: float
    every_seconds: float
    before: bool
    after: bool
    max_rows: int
    samples: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    max_new_tokens: int
    stop: tuple[str, ...]
    rewards: tuple[str, ...]
    accuracy_from: str
    metric: str
    controls: tuple[str, ...]
    patience: int


class Checkpoint_Upload(Group):
    to: tuple[str, ...]
    exports: str
    checkpoints: str
    private: bool
    attempts: int
    wait_seconds: float


class Checkpoint(Group):
    dir: str
    every_steps: int
    every_minutes: float
    every_epochs: float
    at_end: bool
    keep: int
    keep_best: bool
    timeout_seconds: float
    asynchronous: bool
    export_every_steps: int
    export_every_epochs: float
    export_every_minutes: float
    export_at_end: bool
    export_dtype: str
    shard_gb: float
    upload: Checkpoint_Upload


class Log(Group):
    console: str
    tensorboard: bool
    wandb: bool
    wandb_project: str
    wandb_group: str
    wandb_name: str
    wandb_mode: str
    sinks: tuple[str, ...]
    every_steps: int
    print_samples: int
    trace_requests: bool
    report: bool
    rollouts: bool
    thumbnails: int
    level: str


class Plan(Group):
    target: str
    part: str
    image_tokens: int
    json: str
    run: str
    lengths: tuple[int, ...]
    effort: str
    timeout_seconds: float


class Profile(Group):
    steps: tuple[int, ...]
    memory: tuple[int, ...]
    python: bool
    processes: tuple[int, ...]


class Launch(Group):
    hosts: str
    coordinator: str
    processes: int
    process: int
    connect_seconds: float
    heartbeat_seconds: float
    wait_seconds: float


class Record(Group):
    every: int
    last: int


class Replay(Group):
    run: str
    steps: str


class Fork(Group):
    run: str
    step: int


class Certify(Group):
    accept: tuple[str, ...]


class Faults(Group):
    plan: tuple[str, ...]


class Options(Group):
    run: Run
    model: Model
    lora: Lora
    mesh: Mesh
    data: Data
    rollout: Rollout
    env: Env
    sandbox: Sandbox
    reward: Reward
    reward_model: RewardModel
    algorithm: Algorithm
    preference: Preference
    critic: Critic
    reference: Reference
    distill: Distill
    teacher: Teacher
    optimizer: Optimizer
    train: Train
    eval: Eval
    checkpoint: Checkpoint
    log: Log
    plan: Plan
    profile: Profile
    launch: Launch
    record: Record
    replay: Replay
    fork: Fork
    certify: Certify
    faults: Faults
    user: Any


class Config(Options, ConfigDict):
    """A config that is not resolved yet."""
