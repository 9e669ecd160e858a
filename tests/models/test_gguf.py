import random
import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from nanollm.config import ModelConfig, MoeConfig
from nanollm.models.checkpoint import CheckpointError
from nanollm.models.gguf import GGUFCheckpoint, GGUFFile, gguf_config

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, EXPERTS = 4, 2, 8, 32, 64, 96, 3
FLOAT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama: (half, pair) rows of a head become (pair, half)."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tiny_weights(architecture: str, tied: bool = True, bias: bool = False) -> dict[str, np.ndarray]:
    """One layer by Hugging Face's names, random."""
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        f"{layer}mlp.gate_proj.weight": (FFN, HIDDEN),
        f"{layer}mlp.up_proj.weight": (FFN, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, FFN),
    }
    if architecture == "qwen3moe":
        dense = {
            f"{layer}mlp.{x}_proj.weight": shapes.pop(f"{layer}mlp.{x}_proj.weight") for x in ("gate", "up", "down")
        }
        shapes |= {name.replace("mlp", f"mlp.experts.{i}"): dense[name] for name in dense for i in range(EXPERTS)}
        shapes[f"{layer}mlp.gate.weight"] = (EXPERTS, HIDDEN)
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    if architecture in ("qwen3", "qwen3moe"):
        shapes |= {f"{layer}self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    if bias or architecture == "qwen2":
        shapes |= {f"{layer}self_attn.{x}_proj.bias": (n * HEAD_DIM,) for x, n in zip("qkv", (4, 2, 2), strict=True)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.0.": "blk.0.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    weights: dict[str, np.ndarray] | None = None,
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra_tensors: dict[str, np.ndarray] | None = None,
    **fields: object,
) -> Path:
    """A one-layer model as llama.cpp's converter writes it: matrices of `type_`, all else float32, experts stacked.

    fields: more metadata, dots written as two underscores, "arch" for the architecture; None leaves a default out.
    """
    weights = tiny_weights(architecture) if weights is None else weights
    writer = GGUFWriter(path, architecture)
    metadata = {
        "arch__block_count": 1,
        "arch__context_length": 512,
        "arch__embedding_length": HIDDEN,
        "arch__feed_forward_length": FFN,
        "arch__attention__head_count": HEADS,
        "arch__attention__head_count_kv": KV_HEADS,
        "arch__attention__layer_norm_rms_epsilon": 1e-5,
        "tokenizer__ggml__tokens": ["<s>", "</s>", "<|eot|>"],
        "tokenizer__ggml__bos_token_id": 0,
        "tokenizer__ggml__eos_token_id": 1,
    }
    if architecture == "qwen3moe":
        sizes = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": FFN}
        metadata |= {f"arch__{name}": size for name, size in sizes.items()}
    metadata |= fields
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        if value is not None:
            add[type(value)](key.replace("arch__", f"{architecture}__").replace("__", "."), value)
    stacked: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        if ".experts." in name:
            stacked.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(weight)
    weights = {name: weight for name, weight in weights.items() if ".experts." not in name}
    weights |= {name: np.stack(experts) for name, experts in stacked.items()}
    for name, weight in weights.items():
        if architecture == "llama" and (".q_proj" in name or ".k_proj" in name):
            weight = interleave(weight, HEADS if ".q_proj" in name else KV_HEADS)
        for hf, ours in GGUF_NAMES.items():
            name = name.replace(hf, ours)
        kind = type_ if weight.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    for name, weight in (extra_tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_weights_come_back_with_hugging_face_names_and_layout(tmp_path, architecture, tied):
    weights = tiny_weights(architecture, tied, bias=True)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", architecture, weights))
    assert checkpoint.shapes == {name: weight.shape for name, weight in weights.items()}
    for name, weight in weights.items():
        assert torch.equal(checkpoint.read(name, everything(weight.shape)), torch.from_numpy(weight)), name
    checkpoint.close()


@pytest.mark.parametrize("type_", [*FLOAT_TYPES, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_slices_are_those_of_the_whole_tensor(tmp_path, type_):
    weights = tiny_weights("llama")
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "llama", weights, type_))
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = checkpoint.read(name, everything(weights[name].shape))
        assert torch.allclose(whole.float(), torch.from_numpy(weights[name]), atol=0.3)
        for rows, columns in ((slice(5, 19), slice(0, 32)), (slice(0, 32), slice(3, 29))):
            assert torch.equal(checkpoint.read(name, (rows, columns)), whole[rows, columns])


def test_columns_within_one_block_and_across_blocks(tmp_path):
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", type_=GGMLQuantizationType.Q8_0))
    name = "model.layers.0.mlp.down_proj.weight"  # rows of two blocks
    whole = checkpoint.read(name, everything(checkpoint.shapes[name]))
    for columns in (slice(32, 64), slice(33, 40), slice(31, 33), slice(0, 64)):
        assert torch.equal(checkpoint.read(name, (slice(0, HIDDEN), columns)), whole[:, columns])


def test_sixteen_bit_floats_are_not_widened(tmp_path):
    for type_, dtype in ((GGMLQuantizationType.F16, torch.float16), (GGMLQuantizationType.BF16, torch.bfloat16)):
        checkpoint = GGUFCheckpoint(write_gguf(tmp_path / f"{type_.name}.gguf", type_=type_))
        part = checkpoint.read("model.layers.0.mlp.up_proj.weight", (slice(0, 2), slice(0, 4)))
        expected = tiny_weights("llama")["model.layers.0.mlp.up_proj.weight"][:2, :4]
        assert part.dtype == dtype and torch.equal(part, torch.from_numpy(expected).to(dtype))


def test_config_of_a_llama(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", arch__rope__freq_base=5e5, tokenizer__ggml__eot_token_id=2)
    config = ModelConfig.from_hf(gguf_config(path))
    assert (config.architecture, config.hidden_size, config.intermediate_size) == ("LlamaForCausalLM", HIDDEN, FFN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.num_layers, config.vocab_size, config.max_position) == (1, VOCAB, 512)
    assert config.rms_norm_eps == pytest.approx(1e-5) and config.rope.theta == 5e5
    assert config.tie_word_embeddings and not config.qkv_bias
    assert config.eos_token_ids == (1, 2)


def test_an_output_tensor_or_biases_show_in_the_config(tmp_path):
    config = ModelConfig.from_hf(
        gguf_config(write_gguf(tmp_path / "a.gguf", weights=tiny_weights("llama", False, True)))
    )
    assert not config.tie_word_embeddings and config.qkv_bias
    config = ModelConfig.from_hf(gguf_config(write_gguf(tmp_path / "b.gguf", "qwen2")))
    assert config.tie_word_embeddings and config.qkv_bias and not config.o_bias


def test_head_dim_is_its_own_field(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "qwen3", arch__attention__key_length=16, arch__attention__value_length=16)
    assert gguf_config(path)["head_dim"] == 16


def test_rope_scaling_of_each_type(tmp_path):
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32768, "yarn_beta_fast": 16.0}
    fields = {f"arch__rope__scaling__{key}": value for key, value in yarn.items()}
    rope = ModelConfig.from_hf(gguf_config(write_gguf(tmp_path / "a.gguf", "qwen3", **fields))).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position, rope.beta_fast) == ("yarn", 4.0, 32768, 16.0)
    path = write_gguf(tmp_path / "b.gguf", arch__rope__scaling__type="linear", arch__rope__scaling__factor=2.0)
    assert gguf_config(path)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert gguf_config(write_gguf(tmp_path / "c.gguf", arch__rope__scaling__type="none"))["rope_scaling"] is None


def test_rope_scaling_that_is_not_known_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="rope type 'longrope' is not supported"):
        ModelConfig.from_hf(gguf_config(write_gguf(tmp_path / "a.gguf", arch__rope__scaling__type="longrope")))
    fields = {"arch__rope__scaling__type": "yarn", "arch__rope__scaling__yarn_log_multiplier": 0.1}
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.yarn_log_multiplier are not supported"):
        gguf_config(write_gguf(tmp_path / "b.gguf", **fields))


def llama3_factors(factor: float, theta: float = 5e5, head_dim: int = HEAD_DIM) -> np.ndarray:
    """rope_freqs.weight from transformers' own inverse frequencies: unscaled over scaled."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling |= {"rope_type": "llama3", "factor": factor, "rope_theta": theta}
    config = LlamaConfig(rope_parameters=scaling, head_dim=head_dim, max_position_embeddings=131072)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    unscaled = 1.0 / theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    return (unscaled / scaled.double()).float().numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling_is_read_from_rope_freqs(tmp_path, factor):
    tensors = {"rope_freqs.weight": llama3_factors(factor)}
    path = write_gguf(tmp_path / "m.gguf", extra_tensors=tensors, arch__rope__freq_base=5e5)
    rope = ModelConfig.from_hf(gguf_config(path)).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position) == ("llama3", pytest.approx(factor), 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert "rope_freqs.weight" not in GGUFCheckpoint(path).shapes


@pytest.mark.parametrize("factors", [[1, 2, 8, 8], [1, 1, 1, 1, 8], [0, 0, 0, 0]])
def test_other_rope_freqs_are_an_error(tmp_path, factors):
    path = write_gguf(tmp_path / "m.gguf", extra_tensors={"rope_freqs.weight": np.array(factors, np.float32)})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not Llama 3's rope scaling"):
        GGUFCheckpoint(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arch__rope__dimension_count": 4}, r"partial_rotary_factor 0\.5 is not supported"),
        ({"arch__attention__sliding_window": 4096}, "sliding-window attention is not supported"),
        (
            {"arch__expert_count": 8},
            "a mixture of experts is not supported in architecture 'llama'; supported in: qwen3moe",
        ),
        ({"arch__attention__value_length": 16}, "key length 8 and value length 16 must be equal"),
        ({"arch__attention__head_count": None}, r"llama\.attention\.head_count must be a positive integer, got None"),
        ({"arch__attention__head_count_kv": [2, 2]}, "num_key_value_heads in config.json must be an integer"),
        ({"split__count": 3}, "one of 3 parts; join them first with llama-gguf-split --merge"),
    ],
)
def test_models_that_are_not_supported(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(gguf_config(write_gguf(tmp_path / "m.gguf", **fields)))


@pytest.mark.parametrize("architecture", ["gemma3", "bert", "qwen2moe"])
def test_architecture_error_lists_what_is_supported(tmp_path, architecture):
    with pytest.raises(CheckpointError, match=f"'{architecture}' is not supported; supported: llama, qwen2, qwen3"):
        gguf_config(write_gguf(tmp_path / "m.gguf", architecture))


def test_unknown_tensors_keep_their_name_for_the_loader_to_report(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra_tensors={"blk.0.new_thing.weight": np.zeros((2, 2), np.float32)})
    assert "blk.0.new_thing.weight" in GGUFCheckpoint(path).shapes


def header(version: int = 3, tensors: int = 0, fields: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, fields)


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor_info(name: bytes, dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARRAY = struct.pack("<I", 9)
DAMAGED = {
    "empty": (b"", "can't read"),
    "wrong magic": (header(magic=b"PK\3\4"), r"not a GGUF file: it starts with b'PK"),
    "safetensors": (b"\2\0\0\0\0\0\0\0{}", "not a GGUF file"),
    "version 1": (header(version=1), "version 1 is not supported; supported: 2, 3"),
    "big-endian": (header(version=3 << 24), "big-endian file"),
    "cut in the counts": (header()[:20], "damaged or incomplete"),
    "2**60 tensors": (header(tensors=2**60) + bytes(64), f"claims {2**60} tensors, more than the file holds"),
    "2**60 fields": (header(fields=2**60) + bytes(64), f"claims {2**60} metadata fields"),
    "string of 2**62": (header(fields=1) + string(b"key", 2**62) + bytes(64), f"claims {2**62} bytes of a string"),
    "array of 2**62": (header(fields=1) + string(b"k") + ARRAY + struct.pack("<IQ", 4, 2**62), f"{2**62} values"),
    "strings, 2**62": (header(fields=1) + string(b"k") + ARRAY + struct.pack("<IQ", 8, 2**62), f"{2**62} strings"),
    "nested array": (header(fields=1) + string(b"k") + ARRAY + struct.pack("<IQ", 9, 1) + bytes(64), "not supported"),
    "unknown field type": (header(fields=1) + string(b"k") + struct.pack("<I", 77), "unknown metadata type 77"),
    "zeros": (header(fields=2) + bytes(100), "appears twice"),
    "same tensor twice": (header(tensors=2) + 2 * tensor_info(b"t", (4,), 0) + bytes(99), "'t' appears twice"),
    "no dimensions": (header(tensors=1) + tensor_info(b"t", (), 0) + bytes(99), "has 0 dimensions"),
    "2**31 dimensions": (header(tensors=1) + string(b"t") + struct.pack("<I", 2**31) + bytes(99), "dimensions, not 1"),
    "huge tensor": (header(tensors=1) + tensor_info(b"t", (2**40, 2**40), 0), "'t' ends past the end of the file"),
    "offset past the end": (header(tensors=1) + tensor_info(b"t", (4,), 0, 2**50), "'t' ends past the end"),
    "half a block": (header(tensors=1) + tensor_info(b"t", (48,), 8) + bytes(999), "not whole Q8_0 blocks of 32"),
    "unknown quantization": (header(tensors=1) + tensor_info(b"t", (32,), 199), "'t' has type 199.*: F32, F16, Q4_0"),
    "integers": (header(tensors=1) + tensor_info(b"t", (32,), 24), "'t' has type I8, which is not supported; sup"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_a_clear_error(tmp_path, damage):
    data, message = DAMAGED[damage]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(tmp_path / "m.gguf")


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="can't read"):
        GGUFFile(tmp_path / "m.gguf")


def test_file_cut_anywhere_is_an_error(tmp_path):
    data = write_gguf(tmp_path / "m.gguf").read_bytes()
    for length in [*range(0, 2000, 7), *range(2000, len(data), 997), len(data) - 32]:
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            GGUFCheckpoint(tmp_path / "cut.gguf")


def test_random_damage_in_the_header_is_an_error_or_harmless(tmp_path):
    data = write_gguf(
        tmp_path / "m.gguf", "qwen3", extra_tensors={"rope_freqs.weight": llama3_factors(8.0)}
    ).read_bytes()
    rng = random.Random(0)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(1600)] = rng.choice((0, 1, 8, 9, 255, rng.randrange(256)))
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        try:
            ModelConfig.from_hf(gguf_config(tmp_path / "damaged.gguf"))
            GGUFCheckpoint(tmp_path / "damaged.gguf")
        except ValueError:
            pass


def test_smollm2_equals_what_transformers_reads_from_it(smollm2_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):  # only names and shapes are needed of the model
        model = LlamaForCausalLM(LlamaConfig(**gguf_config(smollm2_path)))
    # What from_pretrained(gguf_file=...) calls; that itself needs the accelerate package.
    parsed = load_gguf_checkpoint(smollm2_path, return_tensors=True, model_to_load=model)
    checkpoint = GGUFCheckpoint(smollm2_path)
    assert checkpoint.shapes.keys() == parsed["tensors"].keys() - {"lm_head.weight"}  # tied
    for name, shape in checkpoint.shapes.items():
        assert torch.equal(checkpoint.read(name, everything(shape)), parsed["tensors"][name]), name

    hf = LlamaConfig(**parsed["config"]).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    assert ModelConfig.from_hf(gguf_config(smollm2_path)) == ModelConfig.from_hf(hf)


def test_a_mixture_of_experts_equals_what_transformers_reads_from_it(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", type_=GGMLQuantizationType.Q8_0)
    config = ModelConfig.from_hf(gguf_config(path))
    assert config.moe == MoeConfig(EXPERTS, num_chosen=2, expert_size=FFN, normalize=True, dense_layers=frozenset())
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**gguf_config(path)))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = GGUFCheckpoint(path)
    prefix = "model.layers.0.mlp"
    for i in range(EXPERTS):
        gate, up, down = (
            checkpoint.read(f"{prefix}.experts.{i}.{name}_proj.weight", everything(shape))
            for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN)))
        )
        assert torch.equal(torch.cat((gate, up)), theirs[f"{prefix}.experts.gate_up_proj"][i])
        assert torch.equal(down, theirs[f"{prefix}.experts.down_proj"][i])


def test_layers_with_a_dense_gate_have_no_experts(tmp_path):
    dense = {"blk.0.ffn_gate.weight": np.zeros((FFN, HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", extra_tensors=dense)
    assert ModelConfig.from_hf(gguf_config(path)).moe.dense_layers == {0}


@pytest.mark.parametrize("field", ["expert_count", "expert_used_count", "expert_feed_forward_length"])
def test_experts_need_their_fields(tmp_path, field):
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", **{f"arch__{field}": None})
    with pytest.raises(CheckpointError, match=rf"qwen3moe\.{field} must be a positive integer, got None"):
        gguf_config(path)


def test_a_name_with_braces_is_no_tensor_of_experts(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra_tensors={"odd{}.weight": np.zeros((2, 3), np.float32)})
    assert GGUFCheckpoint(path).shapes["odd{}.weight"] == (2, 3)


def test_smollm2_ends_its_turn_with_im_end(smollm2_path):
    file = GGUFFile(smollm2_path)
    (eos,) = gguf_config(smollm2_path)["eos_token_id"]
    assert file.metadata["tokenizer.ggml.tokens"][eos] == "<|im_end|>"
    assert "<|im_end|>" in file.metadata["tokenizer.chat_template"]
