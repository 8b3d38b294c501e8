"""Text of tokens that arrive one by one."""

import codecs
from collections.abc import Iterable, Sequence

from xylite.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as they come; what `add` and `finish` give joins to `decode`'s text.

    Each piece is whole characters: the bytes of an unfinished one wait for the next token. U+FFFD
    stands only for bytes that are no UTF-8, one for each longest part that could have become a
    character. If the tokens end within a character, `finish` gives one U+FFFD for what there is of
    it, as `decode` does. The cost of a token does not depend on what came before.

    prompt_tail_ids      the prompt's last tokens (4 are enough): a character that begins in the
                         prompt is completed, and a blank at the start belongs to the text
    skip_special_tokens  leave special tokens out
    spaces_between_special_tokens  accepted for vLLM's sake; it concerns tokenizers written in
                         Python only, and changes nothing here
    """

    __slots__ = ("_decoder", "_in_prompt", "_left_out", "_strip", "_token_bytes")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        *,
        spaces_between_special_tokens: bool = True,
    ):
        self._token_bytes = tokenizer.token_bytes
        self._left_out = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.decoding.strip_first and not prompt_tail_ids
        self._decoder.decode(self._bytes(prompt_tail_ids[-4:]))
        self._in_prompt = bool(self._decoder.getstate()[0])  # it ends within a character

    def _bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join([self._token_bytes(i) for i in ids if i not in self._left_out])

    def _first(self, text: str) -> str:
        """The text without what is not its own at its beginning.

        That is the blank which a SentencePiece tokenizer puts before the first word, and the
        U+FFFD for a character that the prompt began and this text does not complete.
        """
        if text and (self._strip or self._in_prompt):
            foreign = " " if self._strip else "\ufffd"
            self._strip = self._in_prompt = False
            return text.removeprefix(foreign)
        return text

    def add(self, ids: Iterable[int]) -> str:
        """The text these tokens complete; "" if there is none yet."""
        return self._first(self._decoder.decode(self._bytes(ids)))

    def finish(self) -> str:
        """The rest: U+FFFD if the tokens ended within a character, else ""."""
        return self._first(self._decoder.decode(b"", final=True))
