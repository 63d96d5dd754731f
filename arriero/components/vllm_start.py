"""How vLLM is told about the machine and started; it is imported by name, so that nothing else needs it."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arriero.components.head_padding import HeadPadding, padding_for
from arriero.components.second_set import second_set
from arriero.engine.errors import UserError

if TYPE_CHECKING:
    from arriero.components.generator import Generator
    from arriero.engine.runtime.context import Context

# vLLM's attention on a CPU; `CPUAttentionBackend.get_supported_head_sizes` says the same once it is imported.
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in this process; workers may have their own
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
    "HF_HUB_OFFLINE": "1",
}
_ON_CPU = {
    "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads of several processes starve each other
    "TORCH_COMPILE_DISABLE": "1",  # in workers; see `_compile_nothing`
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other roles of the run use these cores too
}


def start(config: Generator, model: Any, max_length: int, context: Context) -> Any:
    """An `LLMEngine` with random weights that waits for its first version. UserError if it can't be had."""
    import torch

    from arriero.components.vllm_loading import configured

    for problem in config.vllm.problems(
        config.sampling, config.precision, model=config.model, standby=config.standby is True
    ):
        raise UserError(problem)
    gpu = torch.cuda.is_available()
    for key, value in (_QUIET if gpu else _QUIET | _ON_CPU).items():
        os.environ.setdefault(key, value)
    if not gpu:
        _compile_nothing()
    engine_args: Any = import_module("vllm.engine.arg_utils").EngineArgs
    engine: Any = import_module("vllm.v1.engine.llm_engine").LLMEngine
    options = config.vllm
    try:
        padding = None if gpu else padding_for(Path(config.model), _CPU_HEADS)
    except ValueError as error:
        raise UserError(f"model {config.model!r} can't run on vLLM here: {error}") from error
    cache = min(_cache_bytes(model, padding, options.tensor_parallel) * max_length * config.slots, 4 << 30)
    arguments = engine_args(
        model=config.model,
        skip_tokenizer_init=not config.sampling.stop,
        generation_config="vllm",  # nothing but what each request says
        load_format="dummy",  # the first version comes over the weight plane, like all others
        dtype="bfloat16" if config.precision == "fp8" else config.precision,
        quantization="fp8_per_channel" if config.precision == "fp8" else None,
        hf_overrides={"head_dim": padding.wide} if padding else {},
        max_model_len=max_length,
        max_num_seqs=config.slots,
        enforce_eager=not options.compiled,
        tensor_parallel_size=options.tensor_parallel,
        gpu_memory_utilization=options.memory_share,
        enable_sleep_mode=sleeps(config),
        kv_cache_memory_bytes=options.kv_cache_bytes or (None if gpu else cache),
        logprobs_mode="processed_logprobs",
        async_scheduling=False,  # it samples a step ahead, under weights that may be replaced in between
        worker_extension_cls="arriero.components.vllm_worker.WeightIntake",
        disable_log_stats=True,
    )
    set_num_threads = torch.set_num_threads
    _zero_new_cache_blocks()
    with configured:
        llm = engine.from_engine_args(arguments)
    torch.set_num_threads = set_num_threads  # vLLM replaces it, for the whole process
    name = f"{context.node}-{context.replica}"
    llm.collective_rpc("open_intake", args=(name, context.secret, padding))
    if second_set(config, context, llm.collective_rpc("room_for_twin")):
        llm.collective_rpc("make_twin")
    return llm


def sleeps(config: Generator) -> bool:
    """Whether the engine can give its memory back between its turns: vLLM can on a GPU alone."""
    import torch

    return config.placement.devices == "turns" and torch.cuda.is_available()


def _compile_nothing() -> None:
    """Keep vLLM on a CPU from starting a C++ compiler when it is asked for log-probabilities.

    The environment says so too, but torch reads it when it is imported, which it is by now.
    """
    settings: Any = import_module("torch._dynamo.config")
    settings.disable = True


def _zero_new_cache_blocks() -> None:
    """Let vLLM clear each block of the KV cache that it gives to a request.

    By itself it does so for some models only. Attention multiplies what lies behind the end of a sequence by
    zero, so that one NaN left by an earlier request makes all later ones NaN.
    """
    cache: Any = import_module("vllm.v1.kv_cache_interface").KVCacheConfig
    cache.needs_kv_cache_zeroing = True  # of the class: read once, while an engine is built


def _cache_bytes(model: Any, padding: HeadPadding | None, ranks: int) -> int:
    """Bytes of keys and values per token and rank, in float32."""
    heads = model.num_attention_heads
    kv_heads = getattr(model, "num_key_value_heads", None) or heads
    size = padding.wide if padding else getattr(model, "head_dim", None) or model.hidden_size // heads
    return 2 * 4 * int(model.num_hidden_layers * max(1, kv_heads // ranks) * size)


def leave() -> None:
    """Undo what vLLM has set up for the whole process, once its last engine here is closed."""
    import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()
