"""Loading tokenizers and encoding prompts, against transformers and a byte-pair encoder written from its definition."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from nanollm.models.gguf import GGUFFile
from nanollm.text.tokenizer import encode_prompt, load_tokenizer

QWEN3_FOLDER = Path(__file__).parents[2] / ".cache/qwen3-tokenizer"

TEXTS = """
English: The quick brown fox can't jump over 12,345 lazy dogs (it'll try).
Deutsch: Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich
Français: Dès Noël, où un zéphyr haï me vêt de glaçons würmiens
Tiếng Việt: Tôi có thể ăn thủy tinh mà không hại gì
Русский: Съешь же ещё этих мягких французских булок, да выпей чаю
Ελληνικά: Ξεσκεπάζω την ψυχοφθόρα βδελυγμία
Հայերեն: Կրնամ ապակի ուտել և ինծի անհանգիստ չըներ
ქართული: მინას ვჭამ და არა მტკივა
עברית: אני יכול לאכול זכוכית וזה לא מזיק לי
العربية: أنا قادر على أكل الزجاج و هذا لا يؤلمني
فارسی: من می‌توانم بدونِ احساس درد شيشه بخورم
हिन्दी: मैं काँच खा सकता हूँ और मुझे उससे कोई चोट नहीं पहुंचती
বাংলা: আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না
தமிழ்: நான் கண்ணாடி சாப்பிடுவேன்
ไทย: ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ
አማርኛ: ሰማይ አይታረስ ንጉሥ አይከሰስ
한국어: 나는 유리를 먹을 수 있어요
日本語: 私はガラスを食べられます。それは私を傷つけません
中文: 我能吞下玻璃而不伤身体，数字１２３
ᚠᛇᚻ, 𓀀𓁐, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢: historic and beyond the basic plane
👩‍👩‍👧‍👦 👩🏽‍💻 🏳️‍🌈 🇩🇪 🫠 emoji with joiners, skin tones and flags
def f(x):\n\tif x >= 0x1F:\r\n        return {'a': [x**2, "\\n"]}  # comment\n\n\n
  two leading,   three inside, trailing  \t \n \n
""".strip("\n").split("\n")
TEXTS = [text.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r") for text in TEXTS]


@pytest.fixture(scope="module")
def qwen3_json():
    found = sorted(QWEN3_FOLDER.glob("**/tokenizer.json"))
    if not found:
        pytest.skip("the Qwen3 tokenizer is not in .cache/qwen3-tokenizer: ./launch.sh test puts it there")
    return found[0]


@pytest.fixture(scope="module")
def qwen3(qwen3_json):
    return load_tokenizer(qwen3_json.parent)


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return load_tokenizer(smollm2_path)


@pytest.mark.parametrize("text", TEXTS)
def test_qwen3_gives_text_back(qwen3, text):
    assert qwen3.decode(encode_prompt(qwen3, text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_gives_text_back(smollm2, text):
    assert smollm2.decode(encode_prompt(smollm2, text)) == text


class ByteLevelBPE:
    """GPT-2's encoder, from its definition: cut by its regex, spell bytes as characters, merge the best pair first."""

    def __init__(self, metadata):
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self.rank = {pair: rank for rank, pair in enumerate(merges)}
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.spelled = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}

    def encode(self, text):
        gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        pieces = [piece for part in regex.split(r"(\p{N})", text) for piece in regex.findall(gpt2, part)]
        return [self.ids[token] for piece in pieces for token in self.merge([self.spelled[b] for b in piece.encode()])]

    def merge(self, parts):
        parts = [part for part in parts if part in self.ids]  # there is none for 21 of the bytes
        while pairs := [pair for pair in pairwise(parts) if pair in self.rank]:
            i = list(pairwise(parts)).index(min(pairs, key=self.rank.__getitem__))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return parts


@pytest.fixture(scope="module")
def reference(smollm2_path):
    metadata = GGUFFile(smollm2_path).metadata
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    return ByteLevelBPE(metadata)


@pytest.mark.parametrize("text", [*TEXTS, "  12  3 x1.5\n\n4", "½ ² Ⅷ ٣٤"])
def test_smollm2_encodes_by_the_definition(smollm2, reference, text):
    assert encode_prompt(smollm2, text) == reference.encode(text)


@settings(max_examples=200, deadline=None)
@given(st.text(st.one_of(st.sampled_from(" \n\t'12aé"), st.characters(codec="utf-8", max_codepoint=0x2FFF))))
def test_smollm2_encodes_any_text_by_the_definition(smollm2, reference, text):
    assert encode_prompt(smollm2, text) == reference.encode(text)


def test_smollm2_special_tokens_are_those_its_metadata_names(smollm2):
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id, len(smollm2)) == (1, 2, 2, 49152)


def test_smollm2_control_tokens_are_one_id_and_skipped_in_text(smollm2):
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<jupyter_code>", "<empty_output>"]
    for token in control:
        ids = encode_prompt(smollm2, f"a{token}b")
        assert len(ids) == 3
        assert smollm2.decode(ids, skip_special_tokens=True) == "ab"
        assert smollm2.decode(ids, skip_special_tokens=False) == f"a{token}b"


def test_a_text_of_far_too_many_tokens_is_not_tokenized_to_its_end(smollm2, monkeypatch):
    """What others would have to wait for. One that may fit is tokenized as a whole, whatever is cut on the way."""
    lengths, encode = [], smollm2.encode

    def count(text, **settings):
        lengths.append(len(text))
        return encode(text, **settings)

    monkeypatch.setattr(smollm2, "encode", count)
    text = "Some words of a long text. " * 20_000
    with pytest.raises(ValueError, match="540000 characters has more than 30000 tokens: shorten it"):
        encode_prompt(smollm2, text, most=30_000)
    assert sum(lengths) < 300_000
    spaces = " " * 600_000  # 64 a token
    lengths.clear()
    assert encode_prompt(smollm2, spaces, most=10_000) == encode(spaces)
    assert len(lengths) > 5, "the whole, and pieces before"


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_qwen3_from_gguf_encodes_and_decodes_as_from_its_own_files(qwen3, qwen3_json, tmp_path):
    """Its vocabulary written as llama.cpp writes it: tokens that are controls, user-defined, and padding."""
    own = json.loads(qwen3_json.read_text(encoding="utf-8"))
    tokens, types = [f"[PAD{i}]" for i in range(151936)], [5] * 151936
    for token, i in own["model"]["vocab"].items():
        tokens[i], types[i] = token, 1
    for token in own["added_tokens"]:
        tokens[token["id"]], types[token["id"]] = token["content"], 3 if token["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in own["model"]["merges"]]
    writer = GGUFWriter(tmp_path / "qwen3.gguf", "qwen3")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(151645)
    finish(writer)

    tokenizer = load_tokenizer(tmp_path / "qwen3.gguf")
    assert (tokenizer.eos_token, len(tokenizer), tokenizer.chat_template) == ("<|im_end|>", len(qwen3), None)
    for text in [*TEXTS, "e\u0301 is not composed", "<think>\n\n</think>\n\n<tool_call>{}<|im_end|>"]:
        ids = encode_prompt(qwen3, text)
        assert encode_prompt(tokenizer, text) == ids
        for skip in (True, False):
            decode = {"skip_special_tokens": skip}
            assert tokenizer.decode([*ids, 151700], **decode) == qwen3.decode([*ids, 151700], **decode)


def small_gguf(path, model="gpt2", pre="gpt-2", **extra):
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["<s>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for name, value in extra.items():
        getattr(writer, f"add_{name}")(value)
    finish(writer)
    return path


def test_gguf_that_asks_for_bos_gets_it_on_plain_prompts_only(tmp_path):
    tokenizer = load_tokenizer(small_gguf(tmp_path / "m.gguf", bos_token_id=0, add_bos_token=True))
    assert encode_prompt(tokenizer, "abb") == [0, 3, 2]
    assert encode_prompt(tokenizer, "<s>abb", add_special_tokens=False) == [0, 3, 2]


def test_sentencepiece_gguf_is_read_too(tmp_path):
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(8)
    finish(writer)
    tokenizer = load_tokenizer(tmp_path / "m.gguf")
    ids = encode_prompt(tokenizer, "ab abé</s>")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁ab", "▁ab", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab abé"


def test_gguf_with_an_unknown_pre_tokenizer_is_refused_not_tokenized_wrongly(tmp_path):
    with pytest.raises(ValueError, match=r"'chatglm-bpe' is not supported; supported: smollm, qwen2"):
        load_tokenizer(small_gguf(tmp_path / "m.gguf", pre="chatglm-bpe"))


@pytest.mark.parametrize("content", [None, b"", b"not a model", b"GGUF\3\0\0\0" + b"\xff" * 16])
def test_gguf_that_is_missing_or_damaged_is_an_error_with_its_name(tmp_path, content):
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        load_tokenizer(path)


@pytest.mark.parametrize("config", [None, '{"model_type": "qwen3"}'])
def test_folder_without_a_tokenizer_is_an_error_that_names_the_ways_out(tmp_path, config):
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer=.*skip_tokenizer_init=True"):
        load_tokenizer(tmp_path)


def test_prompt_that_is_not_text_is_an_error(qwen3):
    assert encode_prompt(qwen3, "") == []
    assert encode_prompt(qwen3, "a\0b") == [64, 188, 65]
    with pytest.raises(ValueError, match="half a surrogate pair at character 1"):
        encode_prompt(qwen3, "a\ud83d")
    with pytest.raises(ValueError, match="must be a string, got bytes"):
        encode_prompt(qwen3, b"a")
