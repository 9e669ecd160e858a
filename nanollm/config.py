"""EngineConfig (every user knob, validated once) and ModelConfig (what config.json says about the model)."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nanollm.sampling_params import check_bool, check_float, check_int

# models.registry adds others.
SUPPORTED_ARCHITECTURES = ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Measured: long prompts take a fifth less than with 16 on an H200, where a tile of the prefill kernel is one block.
GPU_BLOCK_SIZE = 64
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return _QWEN3 | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(hidden: int, expert: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _qwen3(hidden, 3 * hidden, layers, heads, tied=False) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": kv_heads,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert,
        "norm_topk_prob": True,
    }


# Shapes for load_format="dummy": benchmarks need no file at all.
NAMED_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32, 4),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64, 4),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. rope_type is one of ROPE_TYPES; fields that a type doesn't use keep their defaults.

    attention_factor: YaRN's scale of cos and sin (Peng et al., 2023); 1 elsewhere.
    original_max_position: positions the model was trained on before scaling (llama3, yarn).
    """

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> "RopeConfig":
        """Read transformers 4's rope_theta + rope_scaling or 5's rope_parameters; unknown types are errors."""
        merged: dict[str, Any] = {} if hf.get("rope_theta") is None else {"rope_theta": hf["rope_theta"]}
        # rope_scaling is last, so that overriding it works on a config.json of transformers 5 too.
        for form in ("rope_parameters", "rope_scaling"):
            value = hf.get(form)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ValueError(f"{form} in config.json must be an object, got {value!r}")
            given = {k: v for k, v in value.items() if v is not None}
            if "factor" in given and not {"rope_type", "type"} & given.keys():
                raise ValueError(f"{form} in config.json has a factor but no rope_type: {', '.join(ROPE_TYPES)}")
            if "type" in given:  # the older name
                given = {"rope_type": given["type"]} | given
            merged |= given
        rope_type = merged.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if nested := [name for name, value in merged.items() if isinstance(value, Mapping)]:
            raise ValueError(
                f"rope settings per layer type ({', '.join(nested)}) are not supported; one for all layers is"
            )
        if (partial := merged.get("partial_rotary_factor", hf.get("partial_rotary_factor"))) not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {partial!r} is not supported; only 1.0 is")

        def number(name: str, default: Any, low: float = 1e-6) -> Any:
            value = merged.get(name, default)
            return value if value is None else check_float(f"rope {name}", value, low, 1e12)

        needs = {"default": (), "linear": ("factor",), "yarn": ("factor",)}.get(
            rope_type, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        if missing := [name for name in needs if name not in merged]:
            raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)} in config.json")
        original = merged.get(
            "original_max_position_embeddings",
            hf.get("original_max_position_embeddings", hf.get("max_position_embeddings", 2048)),
        )
        return RopeConfig(
            theta=number("rope_theta", 10000.0, 1.01 if rope_type == "yarn" else 1e-6),  # YaRN divides by its logarithm
            rope_type=rope_type,
            factor=number("factor", 1.0),
            original_max_position=check_int("original_max_position_embeddings", original, 1, 2**31 - 1),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=number("attention_factor", None),
            mscale=number("mscale", None, 0.0),
            mscale_all_dim=number("mscale_all_dim", None, 0.0),
            truncate=check_bool("rope truncate", merged.get("truncate", True)),
        )


def read_eos_token_ids(value: object) -> tuple[int, ...]:
    """eos_token_id of config.json or generation_config.json: null, one id or a list of them."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_int("eos_token_id", token_id, 0, 2**31 - 1) for token_id in ids)


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in the place of feed-forward layers: of num_experts of expert_size inner features, a token
    goes through the num_chosen that its router finds likeliest, weighted by their probabilities.

    normalize: whether the weights of the chosen are scaled to add up to one.
    dense_layers: indices of the layers without experts.
    """

    num_experts: int
    num_chosen: int
    expert_size: int
    normalize: bool
    dense_layers: frozenset[int]

    @staticmethod
    def from_hf(hf: Mapping[str, Any], num_layers: int) -> "MoeConfig":
        """Read Qwen3-MoE's fields, in transformers 4's or 5's names, or its defaults. ValueError names a wrong one."""

        def size(*names: str, default: int) -> int:
            found = [(name, hf[name]) for name in names if name in hf]
            name, value = found[0] if found else (names[0], default)
            return check_int(f"{name} in config.json", value, 1, 2**31 - 1)

        num_experts = size("num_experts", "num_local_experts", default=128)
        num_chosen = size("num_experts_per_tok", default=8)
        if num_chosen > num_experts:
            raise ValueError(f"num_experts_per_tok {num_chosen} in config.json is more than num_experts {num_experts}")
        step, named = size("decoder_sparse_step", default=1), hf.get("mlp_only_layers")
        named = [] if named is None else named
        if not isinstance(named, list):
            raise ValueError(f"mlp_only_layers in config.json must be a list of layers, got {named!r}")
        dense = {check_int("mlp_only_layers in config.json", layer, 0, 2**31 - 1) for layer in named}
        dense_layers = frozenset(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step)
        return MoeConfig(
            num_experts,
            num_chosen,
            expert_size=size("moe_intermediate_size", default=768),
            normalize=check_bool("norm_topk_prob in config.json", hf.get("norm_topk_prob", False)),
            dense_layers=dense_layers,
        )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, from config.json. head_dim is its own setting, never derived when it is given.

    dtype: the checkpoint's own ("bfloat16", "float16" or "float32"); EngineConfig.dtype decides what is used.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None = None

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a config.json already parsed to a dict; ValueError says which field is wrong or not supported."""
        architectures = hf.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and architectures else architectures
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise ValueError(
                f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}, and "
                "classes of your own that nanollm.models.registry.register was called with"
            )
        if quantization := hf.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            raise ValueError(
                f"quantization {method!r} is not supported; supported: float32, bfloat16 and float16 weights, and GGUF"
            )
        if (activation := hf.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"hidden_act {activation!r} is not supported; only 'silu' is")
        layer_types = hf.get("layer_types") or []
        if hf.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
            raise ValueError("sliding-window attention is not supported; only full attention is")

        def size(name: str, default: Any = None) -> int:
            value = hf.get(name)
            return check_int(f"{name} in config.json", default if value is None else value, 1, 2**31 - 1)

        def flag(name: str) -> bool:
            value = hf.get(name)
            return check_bool(f"{name} in config.json", False if value is None else value)

        num_heads = size("num_attention_heads")
        num_kv_heads = size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}"
            )
        hidden_size = size("hidden_size")
        derived = 128 if architecture == "Qwen3ForCausalLM" else max(hidden_size // num_heads, 1)  # as transformers
        head_dim = size("head_dim", derived)
        if head_dim % 2 or head_dim > 256:
            raise ValueError(f"head_dim must be even and at most 256, got {head_dim}")
        bias = flag("attention_bias")
        qwen2 = architecture == "Qwen2ForCausalLM"
        num_layers = size("num_hidden_layers")
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=size("vocab_size"),
            max_position=size("max_position_embeddings", 2048),
            rms_norm_eps=check_float("rms_norm_eps", hf.get("rms_norm_eps", 1e-6), 0.0, 1.0),
            rope=RopeConfig.from_hf(hf),
            tie_word_embeddings=flag("tie_word_embeddings"),
            qkv_bias=bias or qwen2,
            o_bias=bias and not qwen2,
            mlp_bias=flag("mlp_bias"),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            eos_token_ids=read_eos_token_ids(hf.get("eos_token_id")),
            moe=MoeConfig.from_hf(hf, num_layers) if architecture == "Qwen3MoeForCausalLM" else None,
        )


@dataclass
class EngineConfig:
    """Every engine argument; vLLM's names where it has them. Raises ValueError naming the field, value and range.

    model: a directory, a .gguf file, a hub id, or with load_format="dummy" a named shape (qwen3-0.6b … qwen3-32b,
        qwen3-30b-a3b, qwen3-235b-a22b).
    tokenizer: where the tokenizer is, when not beside the model.
    dtype: "auto" is float32 on the CPU; on a GPU the checkpoint's 16-bit type (bfloat16 unless it says float16;
        float16 on GPUs without bfloat16).
    device: "auto" is a GPU if there is one.
    seed: of requests that bring no seed of their own, and of dummy weights.
    load_format: "auto" (safetensors or GGUF by what is there) or "dummy" (seeded random weights).
    max_model_len: most tokens of prompt plus output; None takes the model's own.
    max_num_seqs: most sequences running at once; of those with penalties, biases, bans,
        min_tokens or structured outputs, 1024 at most.
    max_num_batched_tokens: most tokens computed in one step.
    block_size: tokens a KV block; a power of two. None takes the default: 64 on GPUs, 16 on the CPU.
    num_kv_blocks, kv_cache_memory_bytes: KV cache size, exactly; else gpu_memory_utilization × the GPU's memory
        less everything else, or 4 GiB at most on the CPU, for all ranks together.
    gpu_memory_utilization: share of the GPU's memory that weights, KV cache and all else may take.
    enable_prefix_caching: prompts that begin as earlier ones did share their KV blocks.
    enforce_eager: no CUDA graphs.
    overlap: plan step N + 1 while step N runs; None is on for GPUs, off for the CPU, where there is nothing to overlap.
    attention_backend: "triton" (ours), "flash" (FlashAttention 3, 4 or 2, as installed), "torch" (plain PyTorch,
        slow), or "auto": of triton and flash the faster for this GPU.
    long_prefill_token_threshold: most tokens of one prompt in one step; 0 is no limit.
    tensor_parallel_size: ranks (GPUs, or processes on the CPU) that share the model.
    max_logprobs: most log probabilities that a request may ask for at a token; -1 is the whole vocabulary.
    logprobs_mode: what logprobs are of: "raw_logprobs", the model's own distribution; "processed_logprobs", the one
        that is drawn from; "raw_logits" and "processed_logits", logits instead. Of prompt tokens: always raw_logprobs.
    generation_config: "auto" takes defaults from the model's generation_config.json, "vllm" does not.
    disable_custom_all_reduce: use NCCL only, instead of our kernels that go through the peers' memory.
    step_timeout: seconds after which a rank that doesn't answer is taken for dead.
    revision: branch, tag or commit of a hub id.
    hf_overrides: what replaces fields of config.json, as an object.
    skip_tokenizer_init: token ids in and out, no text.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    load_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    overlap: bool | None = None
    attention_backend: str = "auto"
    long_prefill_token_threshold: int = 0
    tensor_parallel_size: int = 1
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    disable_custom_all_reduce: bool = False
    step_timeout: float = 300.0
    revision: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    skip_tokenizer_init: bool = False

    @staticmethod
    def from_args(model: str, **kwargs: Any) -> "EngineConfig":
        """Build the config; an unknown keyword is a TypeError that names the nearest known one."""
        known = [f.name for f in fields(EngineConfig)]
        for name in kwargs:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                raise TypeError(f"unknown engine argument {name!r}; did you mean {nearest!r}?")
        return EngineConfig(model, **kwargs)

    @property
    def num_rows(self) -> int:
        """Most sequences running: each decodes one token in every step, so no more than a step has tokens."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def gives_kv_cache_size(self) -> bool:
        return self.num_kv_blocks is not None or self.kv_cache_memory_bytes is not None

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and (name == "model" or value is not None):
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        for name, choices in (
            ("dtype", DTYPES),
            ("device", ("auto", "cpu", "cuda")),
            ("load_format", ("auto", "dummy")),
            ("logprobs_mode", LOGPROBS_MODES),
            ("generation_config", ("auto", "vllm")),
            ("attention_backend", ("auto", "triton", "flash", "torch")),
        ):
            if not isinstance(getattr(self, name), str) or getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, low, high in (
            ("seed", -(2**63), 2**63 - 1),
            ("max_num_seqs", 1, 65536),
            ("max_num_batched_tokens", 1, 2**20),
            ("long_prefill_token_threshold", 0, 2**31 - 1),
            ("tensor_parallel_size", 1, 1024),
            ("max_logprobs", -1, 2**31 - 1),
        ):
            setattr(self, name, check_int(name, getattr(self, name), low, high))
        for name, low, high in (
            ("max_model_len", 1, 2**31 - 1),
            ("block_size", 1, 4096),
            ("num_kv_blocks", 1, 2**31 - 1),
            ("kv_cache_memory_bytes", 1, 2**50),
        ):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, check_int(name, value, low, high))
        self.block_size = 16 if self.block_size is None else self.block_size
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two from 1 to 4096, got {self.block_size}")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("num_kv_blocks and kv_cache_memory_bytes both set the KV cache size: give one of them")
        self.gpu_memory_utilization = check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        self.step_timeout = check_float("step_timeout", self.step_timeout, 0.1, 1e6)
        for name in ("enable_prefix_caching", "enforce_eager", "disable_custom_all_reduce", "skip_tokenizer_init"):
            check_bool(name, getattr(self, name))
        if self.overlap is not None:
            check_bool("overlap", self.overlap)
        if not isinstance(self.hf_overrides, dict):
            raise ValueError(f"hf_overrides must be a dict of config.json fields, got {self.hf_overrides!r}")
