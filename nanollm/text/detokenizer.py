"""How token ids become text as they come: what bytes each stands for, and text that never ends in half a character."""

import codecs
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(rb"<0x[0-9A-F]{2}>")  # how SentencePiece vocabularies spell a single byte


class TokenPieces(dict[int, bytes | None]):
    """Token id -> its bytes, filled as ids are met; None for ids that leave no trace (skipped, or past the vocabulary).

    byte_level: whether a token's text is its bytes and nothing else, so that decoding is joining.
    whole: the text of ids that begin and end with a character, if byte_level; filled likewise.
    spelled: of each id, for log probabilities; spelled_first if it is a text's first.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> None:
        self.tokenizer = tokenizer
        self._settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        if not tokenizer.is_fast:
            self._settings["spaces_between_special_tokens"] = spaces_between_special_tokens
        self.byte_level = False
        self.whole: dict[int, str] = {}
        self.spelled, self.spelled_first = _Spelled(self), _Spelled(self, is_first=True)
        special = set(tokenizer.all_special_tokens)
        if tokenizer.is_fast:
            from tokenizers import decoders

            backend = tokenizer.backend_tokenizer
            self.byte_level = isinstance(backend.decoder, decoders.ByteLevel)
            special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._skipped = special if skip_special_tokens else set()

    def __missing__(self, token_id: int) -> bytes | None:
        token: str | None = self.tokenizer.convert_ids_to_tokens([token_id])[0]
        piece = None
        if token is not None and token not in self._skipped:
            try:
                piece = bytes(_BYTE_OF_CHAR[char] for char in token) if self.byte_level else token.encode()
            except KeyError:  # an added token that isn't spelled in the byte alphabet stands for itself
                piece = token.encode()
        self[token_id] = piece
        return piece

    def decode(self, token_ids: list[int]) -> str:
        """Whole decoding; without transformers' clean-up, which changes text that was shown already."""
        return str(self.tokenizer.decode(token_ids, **self._settings))


class _Spelled(dict[int, tuple[str | None, bytes | None]]):
    """Token id -> (its text, the bytes that it adds to a text), filled as ids are met. No bytes if it leaves no trace.

    pieces: None for neither. is_first: it begins the text, where SentencePiece drops a space.
    """

    def __init__(self, pieces: TokenPieces | None, *, is_first: bool = False) -> None:
        self._pieces, self._is_first = pieces, is_first

    def __missing__(self, token_id: int) -> tuple[str | None, bytes | None]:
        pieces = self._pieces
        if pieces is None:
            return None, None
        if (piece := pieces[token_id]) is None:
            text = str(pieces.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        else:
            if not pieces.byte_level:
                alone = pieces.decode([token_id])
                text = alone if self._is_first else pieces.decode([token_id] * 2)[len(alone) :]
                is_byte = text and _BYTE_TOKEN.fullmatch(piece)
                piece = bytes.fromhex(piece[3:5].decode()) if is_byte else text.encode()
            text = piece.decode("utf-8", "replace")
        self[token_id] = text, piece
        return text, piece


NOT_SPELLED = _Spelled(None)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()


class _ByteLevelDetokenizer:
    """Exact and O(1) a token for byte-level BPE: an incremental UTF-8 decoder over the tokens' bytes.

    tokenizers' DecodeStream would do the same by decoding each token twice, and raises "Invalid prefix" when a bad
    sequence is decided late. Python's "replace" and Rust's lossy decoding agree on U+FFFD: one a maximal subpart.
    """

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._incomplete = b""

    def push(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete; an incomplete character waits for its other bytes."""
        pieces = self._pieces
        alone = len(token_ids) == 1 and not self._incomplete
        if alone and (text := pieces.whole.get(token_ids[0])) is not None:
            return text
        data = self._incomplete + b"".join([pieces[token_id] or b"" for token_id in token_ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        if alone and not self._incomplete:
            pieces.whole[token_ids[0]] = text
        return text

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for half a character, as decode() gives it."""
        return self._incomplete.decode("utf-8", "replace")


class _WindowDetokenizer:
    """For the other tokenizers: decode the last shown tokens with the new ones, and show what that adds.

    Byte tokens wait until their run ends: SentencePiece decodes a run as a whole, to U+FFFD each if it isn't UTF-8.
    """

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._window: list[int] = []  # the tokens whose text was shown last, then those that wait
        self._num_shown = 0  # of the window's tokens
        self._shown_len = 0  # characters of their text, decoded alone

    def push(self, token_ids: list[int]) -> str:
        """Return the text that these tokens complete."""
        shown = []
        for token_id in token_ids:
            if (piece := self._pieces[token_id]) is None:
                continue
            self._window.append(token_id)
            if not _BYTE_TOKEN.fullmatch(piece):
                shown.append(self.flush())
        return "".join(shown)

    def flush(self) -> str:
        """Return the text of the tokens that wait, whatever it is."""
        text = self._pieces.decode(self._window)[self._shown_len :]
        if text:
            del self._window[: self._num_shown]
            self._num_shown = len(self._window)
            self._shown_len = len(self._pieces.decode(self._window))
        return text


Detokenizer = _ByteLevelDetokenizer | _WindowDetokenizer


def make_detokenizer(pieces: TokenPieces | None) -> Detokenizer | None:
    """For one text; None without pieces."""
    if pieces is None:
        return None
    return _ByteLevelDetokenizer(pieces) if pieces.byte_level else _WindowDetokenizer(pieces)
