"""Prompts to token ids, with a checkpoint's tokenizer.json or the small one that embodrl ships."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from embodrl.errors import CheckpointError, PolicyFileError

BLANK = "\u2581"
"""SentencePiece's lone space, which ends OpenVLA's prompts."""
TINY_TOKENIZER = Path(__file__).parent / "tiny_tokenizer.json"


MAX_BYTES = 256 * 2**20


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json without padding and truncation; raise ``PolicyFileError`` if invalid."""
    if not path.is_file():
        raise PolicyFileError(f"{path} does not exist", "a checkpoint needs the tokenizer.json of its language model")
    if path.stat().st_size > MAX_BYTES:
        raise PolicyFileError(f"{path} is larger than {MAX_BYTES:,} bytes", "fetch the file again")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for invalid content
        raise PolicyFileError(f"{path} is not a tokenizer: {error}", "fetch the file again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


class FileTokenizer:
    """A tokenizer stored as tokenizer.json."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def save(self, directory: Path) -> None:
        """Write tokenizer.json."""
        self._tokenizer.save(str(directory / "tokenizer.json"))


class PromptTokenizer(FileTokenizer):
    """A tokenizer (tokenizer.json) whose sequences begin with ``bos_id`` and end with ``prompt_end_id``.

    The last id is appended if the text does not end with it. Raises ``CheckpointError`` if the file is invalid.
    """

    def __init__(self, path: Path, bos_id: int, prompt_end_id: int) -> None:
        super().__init__(read_tokenizer(path))
        self.bos_id = bos_id
        self.prompt_end_id = prompt_end_id
        for role, token_id in (("BOS", bos_id), ("the end of a prompt", prompt_end_id)):
            if self._tokenizer.id_to_token(token_id) is None:
                raise CheckpointError(
                    f"{path} has no token of id {token_id}, which is {role}",
                    "use the model's own tokenizer",
                    code="tokenizer-mismatch",
                )
        blank = self._tokenizer.token_to_id(BLANK)
        if blank is not None and blank != prompt_end_id:
            raise CheckpointError(
                f"{path}: the token {BLANK} is {blank}, but the model's prompts end with it as {prompt_end_id}",
                "use the model's own tokenizer",
                code="tokenizer-mismatch",
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt: BOS first, ``prompt_end_id`` last."""
        ids = self._tokenizer.encode(text, add_special_tokens=True).ids
        if not ids or ids[0] != self.bos_id:
            ids = [self.bos_id, *ids]
        return ids if ids[-1] == self.prompt_end_id else [*ids, self.prompt_end_id]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without BOS and EOS."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def tiny_prompt_end_id() -> int:
    """Return the shipped tokenizer's id of a lone space, which stands for Llama's 29871."""
    token = Tokenizer.from_file(str(TINY_TOKENIZER)).token_to_id("\u0120")
    assert token is not None
    return token


def tiny_tokenizer() -> PromptTokenizer:
    """Return the shipped tokenizer."""
    return PromptTokenizer(TINY_TOKENIZER, bos_id=1, prompt_end_id=tiny_prompt_end_id())
