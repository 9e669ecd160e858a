"""Which tokenizer a model has, and how a prompt becomes token ids."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanollm.sampling_params import check_unicode

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

WAY_OUT = "pass tokenizer=<directory or hub id of one>, or skip_tokenizer_init=True and token ids as prompts"

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
# tokenizer.ggml.pre -> how text is cut before merging: a regex, "digits" (each digit alone, then GPT-2's) or "gpt2".
_PRE_TOKENIZERS = {
    "smollm": "digits",
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "gpt-2": "gpt2",
    "default": "gpt2",
}
_PIECE = 2**16  # characters
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type


def load_tokenizer(path: str | Path, *, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a local directory, a hub id (at `revision`) or a .gguf file; never runs the model's code.

    Raises ValueError, with the ways out, if there is none there or it can't be read.
    """
    try:
        if Path(path).suffix == ".gguf":
            return _load_gguf(Path(path))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=False)
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"can't load a tokenizer from {str(path)!r}; {WAY_OUT} ({error})") from error
    # Given a config.json and no vocabulary, transformers 5 returns a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"there is no tokenizer in {str(path)!r}; {WAY_OUT}")
    return tokenizer


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool = True, most: int | None = None
) -> list[int]:
    """Return the token ids of `text`; special tokens written in it count as such.

    add_special_tokens: True for a plain prompt; False for a rendered chat template, which brings its own BOS.
    most: tokens; a text of far more is refused before all of it is tokenized, which others may have to wait for.
    Raises ValueError for that, and for what isn't text: another type, or half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise ValueError(f"a prompt to tokenize must be a string, got {type(text).__name__}")
    check_unicode("the prompt", text)
    # verbose=False: the engine says itself what is a little too long. Cut anywhere, a text has about as many tokens.
    if most is not None and len(text) > max(_PIECE, 16 * most):  # few texts that fit are as long
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False, verbose=False))
            if count > most + most // 4:
                raise ValueError(f"the text of {len(text)} characters has more than {most} tokens: shorten it")
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))


def encode_bad_words(tokenizer: "PreTrainedTokenizerBase", words: list[str]) -> list[list[int]]:
    """The token ids of each word as it may come: at a start, and after a space.

    As in vLLM, the second counts if the space changes the first token and adds none, so it isn't a token of its own.
    """
    sequences = []
    for word in words:
        bare, spaced = (
            list(tokenizer.encode(space + word.lstrip(" "), add_special_tokens=False)) for space in ("", " ")
        )
        sequences.append(bare)
        if spaced[:1] != bare[:1] and len(spaced) == len(bare):
            sequences.append(spaced)
    return [sequence for sequence in sequences if sequence]


def _load_gguf(path: Path) -> "PreTrainedTokenizerBase":
    """Byte-level BPE is built from the metadata; SentencePiece vocabularies go through transformers' conversion.

    transformers 5.24 takes seconds for either, and tokenizes byte-level ones wrong: it doesn't split SmolLM's digits,
    nor bring Qwen's text to NFC.
    """
    from transformers import PreTrainedTokenizerFast

    from nanollm.models.gguf import GGUFFile

    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase
    prefix = "tokenizer.ggml."
    metadata = GGUFFile(path).metadata
    tokens = metadata[prefix + "tokens"]
    bos_id = metadata.get(prefix + "bos_token_id")
    if metadata[prefix + "model"] != "gpt2":
        tokenizer = tokenizer_class.from_pretrained(str(path.parent), gguf_file=path.name)
        if bos_id is not None and metadata.get(prefix + "add_bos_token", True):
            _start_with(tokenizer.backend_tokenizer, tokens[bos_id], bos_id)
        return tokenizer
    types = metadata.get(prefix + "token_type", [1] * len(tokens))
    pre = metadata.get(prefix + "pre", "default")
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {name: metadata.get(f"{prefix}{key}_token_id") for name, key in names.items()}
    bpe = _byte_level_bpe(tokens, types, metadata[prefix + "merges"], pre)
    if bos_id is not None and metadata.get(prefix + "add_bos_token", _PRE_TOKENIZERS[pre] is _LLAMA3_SPLIT):
        _start_with(bpe, tokens[bos_id], bos_id)
    tokenizer = tokenizer_class(
        tokenizer_object=bpe,
        clean_up_tokenization_spaces=False,
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _start_with(tokenizer: "Tokenizer", token: str, token_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, token_id)])


def _byte_level_bpe(tokens: list[str], types: list[int], merges: list[str], pre: str) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")
    split = _PRE_TOKENIZERS[pre]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=split is _LLAMA3_SPLIT))
    if split is _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps: dict[str, list[Any]] = {
        "gpt2": [byte_level],
        "digits": [pre_tokenizers.Digits(individual_digits=True), byte_level],
    }
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        steps.get(split)
        or [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in _of(tokens, types, _CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _of(tokens, types, _USER_DEFINED)])
    return tokenizer


def _of(tokens: list[str], types: list[int], kind: int) -> list[str]:
    return [token for token, its_kind in zip(tokens, types, strict=True) if its_kind == kind]
