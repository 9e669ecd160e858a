"""What grammars cost on a GPU: time per output token with none, one and 64 of 64 rows under a JSON schema.

The model has random weights in Qwen3-0.6B's shape, so its text wanders through the strings of the schema, where a mask
costs most. The tokenizer is made up, with as many tokens as Qwen3's.
"""

import itertools
import string
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanollm import LLM, SamplingParams
from tests.conftest import random_prompt
from tests.test_structured_outputs import all_tokens, byte_settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUM_ROWS, NUM_TOKENS, NUM_TEXT_TOKENS, EOS = 64, 256, 151643, 151645
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 32},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 10_000}  # more than there are tokens for


def save_large_tokenizer(path: Path) -> str:
    """Bytes, JSON's punctuation, and words with and without a space or capital before them."""
    words = ("".join(letters) for n in (2, 3, 4) for letters in itertools.product(string.ascii_lowercase, repeat=n))
    spelled = (form for word in words for form in (word, f"Ġ{word}", word.capitalize(), f"Ġ{word.capitalize()}"))
    marks = ['{"', '":', '",', 'Ġ"', "Ġ{", '"}', "}]", "},", "Ġ[", '["', '"]', "[]", "ĠĠ", "Ċ"]
    numbers = (str(i) for i in range(10, 1000))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*itertools.islice(dict.fromkeys(itertools.chain(letters, marks, numbers, spelled)), NUM_TEXT_TOKENS)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.token_to_id("<|im_end|>") == EOS
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(path)
    return str(path)


def tpot(llm: LLM, prompts: list[list[int]], num_grammars: int) -> float:
    """Milliseconds, of the median row in the best of three runs."""
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    held = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, structured_outputs={"json": PEOPLE})
    params = [held if i < num_grammars else free for i in range(NUM_ROWS)]
    found = []
    for _ in range(3):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
        found.append(median(output.metrics.tpot * 1e3 for output in outputs if output.metrics and output.metrics.tpot))
    return min(found)


def test_grammars_cost_little(tmp_path: Path) -> None:
    tokenizer = save_large_tokenizer(tmp_path)
    prompts = [random_prompt(120, seed=i) for i in range(NUM_ROWS)]
    with LLM("qwen3-0.6b", load_format="dummy", tokenizer=tokenizer, max_num_seqs=NUM_ROWS, max_model_len=1024) as llm:
        for num_grammars in (0, 1, NUM_ROWS):  # warm, and the grammar is compiled
            tpot(llm, prompts, num_grammars)
        free, one, every = (tpot(llm, prompts, num_grammars) for num_grammars in (0, 1, NUM_ROWS))
    print(f"TPOT of {NUM_ROWS} rows: {free:.3f} ms without grammars, {one:.3f} with one, {every:.3f} with {NUM_ROWS}")
    assert one <= 1.10 * free
    assert every <= 1.35 * free


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"overlap": False}])
def test_grammars_and_processors_give_the_tokens_of_the_cpu(
    tiny: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    tokenizer = byte_settings(tmp_path)
    with tiny("qwen3").llm(device="cpu", **tokenizer) as llm:
        expected = all_tokens(llm)
    with tiny("qwen3").llm(device="cuda", **tokenizer, **settings) as llm:
        assert all_tokens(llm) == expected
        assert all_tokens(llm) == expected
