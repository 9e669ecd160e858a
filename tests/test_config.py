import json

import pytest
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config

from nanollm.config import NAMED_SHAPES, EngineConfig, ModelConfig, RopeConfig

QWEN3 = NAMED_SHAPES["qwen3-8b"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def rope_from_transformers(hf: dict[str, object]) -> RopeConfig:
    """The same config.json as transformers 5 reads it: everything in one rope_parameters."""
    parameters = AutoConfig.for_model("qwen3", **json.loads(json.dumps(hf))).rope_parameters
    return RopeConfig.from_hf({"rope_parameters": parameters, "max_position_embeddings": 40960})


ROPE_FORMS = {
    "nothing but theta": {"rope_theta": 5e5},
    "scaling null": {"rope_theta": 5e5, "rope_scaling": None},
    "4: linear": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "4: older name of the type": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
    "4: default": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
    "4: llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "4: yarn": {"rope_theta": 1e6, "rope_scaling": YARN},
    "4: yarn, older name": {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}},
    "4: yarn with all settings": {
        "rope_theta": 1e6,
        "rope_scaling": YARN
        | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    },
    "4: yarn with attention_factor": {"rope_theta": 1e6, "rope_scaling": YARN | {"attention_factor": 1.5}},
    "5: default": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "5: theta only": {"rope_parameters": {"rope_theta": 1e6}},
    "5: linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
    "5: llama3": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    "5: yarn": {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "5: both thetas": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_rope_in_every_form_of_transformers_4_and_5(form):
    hf = QWEN3 | {"rope_theta": None} | ROPE_FORMS[form]
    without_null = {key: value for key, value in hf.items() if value is not None}
    rope = RopeConfig.from_hf(hf)
    assert rope == rope_from_transformers(without_null)
    if "factor" in (settings := without_null.get("rope_scaling") or without_null.get("rope_parameters") or {}):
        assert (rope.factor, rope.rope_type) == (settings["factor"], settings.get("rope_type", settings.get("type")))


def test_rope_of_a_saved_config_is_the_one_it_was_made_with(tmp_path):
    for scaling in (None, LLAMA3, YARN):
        made = LlamaConfig(rope_theta=5e5, rope_scaling=scaling and dict(scaling), architectures=["LlamaForCausalLM"])
        made.save_pretrained(tmp_path)
        rope = RopeConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
        assert rope.theta == 5e5 and rope.rope_type == (scaling or {}).get("rope_type", "default")


def test_rope_theta_defaults_as_in_transformers():
    assert RopeConfig.from_hf({}).theta == LlamaConfig().rope_parameters["rope_theta"] == 10000.0


def test_yarn_without_original_length_was_trained_on_max_position_embeddings():
    hf = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 1024}
    assert RopeConfig.from_hf(hf).original_max_position == 1024


def test_overriding_rope_scaling_works_on_a_config_of_transformers_5_too():
    hf = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    }
    rope = RopeConfig.from_hf(hf)
    assert (rope.rope_type, rope.factor, rope.theta) == ("yarn", 4.0, 1e6)


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "su", "mrope", "ntk", 3, ["yarn"]])
def test_rope_of_unknown_type_is_never_silently_ignored(form, rope_type):
    with pytest.raises(ValueError, match=r"rope type .* is not supported; supported: default, linear, llama3, yarn"):
        RopeConfig.from_hf({form: {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling in config.json has a factor but no rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, "'yarn' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"rope_scaling": "yarn"}, "rope_scaling in config.json must be an object, got 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope factor must be a finite number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope factor must be a finite number"),
        (
            {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_theta must be .* from 1.01 to",
        ),
        ({"rope_theta": float("nan")}, "rope rope_theta must be a finite number|rope_theta must be a finite number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, r"per layer type \(full_attention\)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    ],
)
def test_malformed_rope(hf, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(hf)


SIZES = {"vocab_size": 301, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3}


@pytest.mark.parametrize(
    "made",
    [
        Qwen3Config(**SIZES, num_attention_heads=9, num_key_value_heads=3, architectures=["Qwen3ForCausalLM"]),
        Qwen3Config(**SIZES, head_dim=80, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]),
        Qwen2Config(**SIZES, num_attention_heads=6, num_key_value_heads=2, architectures=["Qwen2ForCausalLM"]),
        LlamaConfig(**SIZES, num_attention_heads=9, num_key_value_heads=3, architectures=["LlamaForCausalLM"]),
        LlamaConfig(
            **SIZES, num_attention_heads=2, attention_bias=True, mlp_bias=True, architectures=["LlamaForCausalLM"]
        ),
        LlamaConfig(
            **SIZES, num_attention_heads=2, eos_token_id=[1, 2], dtype="bfloat16", architectures=["LlamaForCausalLM"]
        ),
    ],
    ids=["qwen3", "qwen3 tied", "qwen2", "llama 9/3 heads", "llama with biases", "llama with two EOS"],
)
def test_saved_config_has_the_values_transformers_uses(tmp_path, made):
    made.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert [config.architecture] == made.architectures
    assert (config.vocab_size, config.hidden_size) == (made.vocab_size, made.hidden_size)
    assert (config.intermediate_size, config.num_layers) == (made.intermediate_size, made.num_hidden_layers)
    assert (config.num_heads, config.num_kv_heads) == (made.num_attention_heads, made.num_key_value_heads)
    assert config.head_dim == (getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads)
    assert (config.max_position, config.rms_norm_eps) == (made.max_position_embeddings, made.rms_norm_eps)
    assert config.tie_word_embeddings == made.tie_word_embeddings
    assert config.rope.theta == made.rope_parameters["rope_theta"]
    assert config.o_bias == getattr(made, "attention_bias", False)
    assert config.qkv_bias == (getattr(made, "attention_bias", False) or isinstance(made, Qwen2Config))
    assert config.mlp_bias == getattr(made, "mlp_bias", False)
    assert config.dtype == ("bfloat16" if made.dtype is not None else "float32")
    eos = made.eos_token_id
    assert config.eos_token_ids == tuple(eos if isinstance(eos, list) else [] if eos is None else [eos])


def test_head_dim_of_a_qwen3_that_does_not_say_is_transformers_default():
    hf = {key: value for key, value in QWEN3.items() if key != "head_dim"} | {"hidden_size": 2048}
    assert ModelConfig.from_hf(hf).head_dim == Qwen3Config().head_dim == 128


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_named_shapes_are_whole_configs(name):
    config = ModelConfig.from_hf(NAMED_SHAPES[name])
    inner = config.intermediate_size if config.moe is None else config.moe.num_experts * config.moe.expert_size
    matrices = (
        config.num_layers
        * config.hidden_size
        * (2 * config.head_dim * (config.num_heads + config.num_kv_heads) + 3 * inner)
    )
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    billions = float(name.split("-")[1].removesuffix("b"))
    assert (matrices + embeddings) / 1e9 == pytest.approx(billions, rel=0.06)


MOE = NAMED_SHAPES["qwen3-30b-a3b"]


def test_experts_in_the_names_of_transformers_4_and_5():
    moe = ModelConfig.from_hf(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 48]}).moe  # there is no layer 48
    assert (moe.num_experts, moe.num_chosen, moe.expert_size, moe.normalize) == (128, 8, 768, True)
    assert moe.dense_layers == {1, *range(0, 48, 2)}
    renamed = {name: value for name, value in MOE.items() if name != "num_experts"} | {"num_local_experts": 64}
    assert ModelConfig.from_hf(renamed).moe.num_experts == 64
    assert ModelConfig.from_hf(QWEN3).moe is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 in config.json is more than num_experts 128"),
        ({"num_experts": 0}, "num_experts in config.json must be"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok in config.json must be"),
        ({"mlp_only_layers": {}}, "mlp_only_layers in config.json must be a list of layers, got {}"),
        ({"mlp_only_layers": 3}, "mlp_only_layers in config.json must be a list of layers, got 3"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers in config.json must be"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob in config.json must be"),
    ],
)
def test_experts_that_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(MOE | wrong)


@pytest.mark.parametrize("architectures", [["Gemma3ForCausalLM"], ["BertModel"], [], None, "BertModel", [3], {}])
def test_unsupported_architecture_lists_the_supported_ones(architectures):
    message = "is not supported; supported: Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN3 | {"architectures": architectures})


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes"])
def test_quantized_model_lists_what_is_supported(method):
    message = f"quantization '{method}' is not supported; supported: float32, bfloat16 and float16 weights, and GGUF"
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN3 | {"quantization_config": {"quant_method": method, "bits": 4}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention is not supported"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 must be a multiple of num_key_value_heads 5"),
        ({"head_dim": 7}, "head_dim must be even and at most 256, got 7"),
        ({"head_dim": 512}, "head_dim must be even and at most 256, got 512"),
        ({"hidden_size": None}, "hidden_size in config.json must be an integer from 1 to 2147483647, got None"),
        ({"hidden_size": "4096"}, "hidden_size in config.json must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in config.json must be an integer from 1"),
        ({"vocab_size": True}, "vocab_size in config.json must be an integer"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings in config.json must be True or False, got 'false'"),
        ({"attention_bias": "false"}, "attention_bias in config.json must be True or False, got 'false'"),
        ({"mlp_bias": 0}, "mlp_bias in config.json must be True or False, got 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number from 0 to 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer from 0"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be an integer from 0 to 2147483647, got -1"),
    ],
)
def test_config_errors_name_the_field_and_the_value(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN3 | fields)


@pytest.mark.parametrize("eos", [None, 7, [7, 8], []])
def test_eos_token_ids_are_a_tuple(eos):
    expected = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    assert ModelConfig.from_hf(QWEN3 | {"eos_token_id": eos}).eos_token_ids == expected


@pytest.mark.parametrize(
    ("field", "value"), [("torch_dtype", "float16"), ("dtype", "float16"), ("dtype", "torch.float16")]
)
def test_dtype_by_either_name(field, value):
    hf = {key: v for key, v in QWEN3.items() if key != "torch_dtype"}
    assert ModelConfig.from_hf(hf | {field: value}).dtype == "float16"
    assert ModelConfig.from_hf(hf).dtype == "float32"


def test_unknown_engine_argument_names_the_nearest_known_one():
    with pytest.raises(TypeError, match="unknown engine argument 'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_args("m", max_num_seq=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", None),
        ("tokenizer", ""),
        ("revision", 3),
        ("dtype", "int8"),
        ("load_format", "pt"),
        ("device", "tpu"),
        ("attention_backend", "magic"),
        ("seed", 1.5),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("max_model_len", "4096"),
        ("block_size", 24),
        ("block_size", 0),
        ("num_kv_blocks", -1),
        ("kv_cache_memory_bytes", 0),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", float("nan")),
        ("enable_prefix_caching", 1),
        ("enforce_eager", "yes"),
        ("overlap", 0),
        ("tensor_parallel_size", 0),
        ("hf_overrides", [1]),
    ],
)
def test_bad_engine_argument_is_an_error_naming_field_and_value(field, value):
    with pytest.raises(ValueError, match=rf"{field} must be .*, got {value!r}".replace("[", r"\[")):
        EngineConfig(**{"model": "m"} | {field: value})


def test_only_one_of_two_kv_cache_sizes():
    with pytest.raises(ValueError, match="num_kv_blocks and kv_cache_memory_bytes both set the KV cache size"):
        EngineConfig("m", num_kv_blocks=8, kv_cache_memory_bytes=2**20)


def test_block_size_defaults_to_sixteen():
    assert EngineConfig("m").block_size == 16
