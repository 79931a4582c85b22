"""Action tokenizers: a chunk of normalised actions <-> a sequence of integers.

Shape suffixes: B samples, T chunk, A action dims.

::

    binning   chunk [T,A] --256 uniform bins of [-1,1]--> T*A tokens, time first                        (OpenVLA)
    DCT       chunk [T,A] --DCT along T--> x scale, round --> T*A integers, low frequencies first
                          --one character each--> byte pair encoding (BPE) --> at most T*A tokens       (FAST)

Sources: OpenVLA (Kim et al. 2024, arXiv 2406.09246, section 3.2); FAST (Pertsch et al. 2025, arXiv 2501.09747,
section V and algorithm 1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import scipy.fft
import torch
from torch import Tensor

INSTALL = "pip install 'nexus-lightning[backbone]'"
#: FAST's default: DCT coefficients are multiplied by it before rounding.
DCT_SCALE = 10.0
#: Characters stand for integers; code points from here on are no characters (UTF-16 surrogates).
MAX_INTEGERS = 0xD800


class BinningTokenizer:
    """One token per action element: ``bins`` uniform bins of [-1, 1]; values outside are clamped.

    The round trip errs by at most half a bin, ``1 / bins``. (OpenVLA's bins span the 1st to the 99th percentile of the
    data: here the tenant's normaliser maps actions to [-1, 1].)

    Example:
        >>> tokenizer = BinningTokenizer(bins=4)
        >>> tokenizer.encode(torch.tensor([-1.0, -0.1, 0.1, 7.0])).tolist()
        [0, 1, 2, 3]
        >>> tokenizer.decode(torch.tensor([0, 3])).tolist()
        [-0.75, 0.75]
    """

    def __init__(self, bins: int = 256) -> None:
        if bins < 2:
            raise ValueError(f"bins={bins}: must be at least 2")
        self.bins = bins

    @property
    def vocab_size(self) -> int:
        return self.bins

    def encode(self, actions: Tensor) -> Tensor:
        """Float ``[...]`` -> int64 ``[...]`` in ``[0, bins)``."""
        return ((actions.clamp(-1, 1) + 1) / 2 * self.bins).long().clamp(max=self.bins - 1)

    def decode(self, tokens: Tensor) -> Tensor:
        """int64 ``[...]`` -> float32 ``[...]``, the centres of the bins."""
        return (2 * tokens.float() + 1) / self.bins - 1


class DCTTokenizer:
    """FAST: discrete cosine transform, rounding, byte pair encoding.

    The coefficients of the orthonormal DCT-II along time are multiplied by ``scale``, rounded, and clipped to
    ``[minimum, maximum]``; the default range holds every chunk with values in [-1, 1]. Rounding moves a coefficient
    by at most ``0.5 / scale``, so the round trip of such a chunk errs by at most ``sqrt(T) / (2 * scale)`` in the norm
    of one action dim over time, hence in every element. BPE loses nothing.

    Without a ``bpe`` every integer is a token (T*A tokens per chunk, no data needed); :meth:`fit` learns merges, which
    shorten the sequence. Immutable: copies of a head share it, and threads may use it at once.

    Args:
        chunk: T.
        action_dim: A.
        scale: larger is finer.
        minimum: smallest integer, character 0.
        maximum: largest integer.
        bpe: a ``tokenizers.Tokenizer`` over the characters ``chr(integer - minimum)``.

    Raises:
        ValueError: a value out of range.
        ImportError: the package ``tokenizers`` is missing; the message has the install line.

    Example:
        >>> tokenizer = DCTTokenizer(chunk=4, action_dim=1)
        >>> tokens = tokenizer.encode(torch.full((1, 4, 1), 0.5))
        >>> tokens, tokenizer.decode(tokens).flatten().tolist()
        ([[30, 20, 20, 20]], [0.5, 0.5, 0.5, 0.5])
    """

    def __init__(
        self,
        chunk: int,
        action_dim: int,
        scale: float = DCT_SCALE,
        minimum: int | None = None,
        maximum: int | None = None,
        bpe=None,
    ) -> None:
        for key, value in (("chunk", chunk), ("action_dim", action_dim), ("scale", scale)):
            if value <= 0:
                raise ValueError(f"{key}={value}: must be positive")
        # Largest coefficient of a chunk in [-1, 1]: the constant one, with coefficient sqrt(T).
        limit = math.ceil(scale * math.sqrt(chunk))
        self.chunk, self.action_dim, self.scale = chunk, action_dim, float(scale)
        self.minimum = -limit if minimum is None else minimum
        self.maximum = limit if maximum is None else maximum
        if not self.minimum <= 0 <= self.maximum or self.num_integers > MAX_INTEGERS:
            raise ValueError(
                f"minimum={self.minimum}, maximum={self.maximum}: 0 must lie between them, and they may span at most "
                f"{MAX_INTEGERS} integers; lower scale={scale}"
            )
        self.bpe = _without_merges(self.num_integers) if bpe is None else bpe
        self.vocab_size = self.bpe.get_vocab_size()
        byte_level = (json.loads(self.bpe.to_str())["decoder"] or {}).get("type") == "ByteLevel"
        #: Upper bound of a chunk's tokens: one per character, or per UTF-8 byte when the BPE works on bytes (FAST's).
        self.max_tokens = chunk * action_dim * (len(chr(self.num_integers - 1).encode()) if byte_level else 1)

    def __deepcopy__(self, memo: dict) -> DCTTokenizer:
        return self

    @property
    def num_integers(self) -> int:
        return self.maximum - self.minimum + 1

    def encode(self, actions_BTA: Tensor) -> list[list[int]]:
        """Float ``[B, T, A]`` -> B token sequences of different lengths.

        Raises:
            ValueError: another chunk length or action dim than this tokenizer's.
        """
        if tuple(actions_BTA.shape[1:]) != (self.chunk, self.action_dim):
            raise ValueError(
                f"actions of shape {list(actions_BTA.shape)}: the tokenizer is for [B, {self.chunk}, {self.action_dim}]"
            )
        # One by one: encode_batch starts a thread pool, which does not survive the forks of data loaders.
        return [self.bpe.encode(text, add_special_tokens=False).ids for text in self._texts(actions_BTA)]

    def decode(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """B token sequences -> float32 ``[B, T, A]``.

        Any sequence is decoded: missing coefficients are zero, those too many are dropped (as FAST does), and integers
        out of range are clipped.
        """
        size = self.chunk * self.action_dim
        integers = np.zeros((len(tokens), size))
        for row, sequence in enumerate(tokens):
            text = self.bpe.decode(list(sequence), skip_special_tokens=False)
            given = np.array([ord(character) for character in text[:size]], dtype=np.int64) + self.minimum
            integers[row, : len(given)] = given.clip(self.minimum, self.maximum)
        coefficients = integers.reshape(-1, self.chunk, self.action_dim) / self.scale
        return torch.from_numpy(scipy.fft.idct(coefficients, type=2, axis=1, norm="ortho")).float()

    def _texts(self, actions_BTA: Tensor) -> list[str]:
        actions = actions_BTA.detach().cpu().double().numpy()
        coefficients = scipy.fft.dct(actions, type=2, axis=1, norm="ortho")
        integers = np.rint(coefficients * self.scale).clip(self.minimum, self.maximum).astype(np.int64) - self.minimum
        # [frequency, dim] read row by row: the lowest frequency of all dims comes first.
        return ["".join(map(chr, row)) for row in integers.reshape(len(actions), -1).tolist()]

    @classmethod
    def fit(cls, chunks: Tensor, vocab_size: int = 1024, scale: float = DCT_SCALE) -> DCTTokenizer:
        """Learn BPE merges from normalised chunks ``[N, T, A]`` (see :func:`episode_chunks`).

        Args:
            chunks: as the head sees them, after the tenant's normaliser.
            vocab_size: integers plus merges (fewer when no pair occurs twice any more).
            scale: as in the class.

        Raises:
            ValueError: ``chunks`` is empty or no such tensor, or ``vocab_size`` is below the number of integers.
        """
        if chunks.ndim != 3 or not len(chunks):
            raise ValueError(f"chunks of shape {list(chunks.shape)}: give [N, T, A] with N at least 1")
        plain = cls(chunks.shape[1], chunks.shape[2], scale)
        if vocab_size < plain.num_integers:
            raise ValueError(
                f"vocab_size={vocab_size}: must be at least {plain.num_integers}, the integers at scale={scale}"
            )
        tokenizers = _tokenizers()
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.decoder = tokenizers.decoders.Fuse()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=_alphabet(plain.num_integers), min_frequency=2, show_progress=False
        )
        bpe.train_from_iterator(plain._texts(chunks), trainer)
        return cls(plain.chunk, plain.action_dim, scale, plain.minimum, plain.maximum, bpe)

    @classmethod
    def from_pretrained(cls, name: str, chunk: int, action_dim: int) -> DCTTokenizer:
        """The BPE, scale and smallest integer of a Hugging Face FAST processor.

        They are read from its ``tokenizer.json`` and ``processor_config.json``: ``AutoProcessor`` would run the Python
        file beside them, and from transformers 5.1 on fails to load the published one
        (huggingface/transformers#44987).

        Args:
            name: ``physical-intelligence/fast`` when it is in the local Hugging Face cache, or a folder.
            chunk: T.
            action_dim: A.

        Raises:
            ValueError: it is not on this machine, or not a FAST processor.
            ImportError: transformers is missing; the message has the install line.
        """
        try:
            from transformers.utils import cached_file
        except ImportError as error:
            raise ImportError(f"pretrained={name!r} needs transformers: {INSTALL}") from error
        try:
            paths = [cached_file(name, f, local_files_only=True) for f in ("tokenizer.json", "processor_config.json")]
        except OSError as error:
            raise ValueError(
                f"pretrained={name!r}: neither a folder with tokenizer.json and processor_config.json nor in the local "
                "Hugging Face cache; download it first, for example `hf download physical-intelligence/fast`"
            ) from error
        config = json.loads(Path(paths[1]).read_text())
        if not {"scale", "min_token"} <= config.keys():
            raise ValueError(
                f"pretrained={name!r}: its processor_config.json has no scale and min_token, so it is no FAST processor"
            )
        bpe = _tokenizers().Tokenizer.from_file(str(paths[0]))
        return cls(chunk, action_dim, config["scale"], minimum=min(int(config["min_token"]), 0), bpe=bpe)

    def to_bytes(self) -> bytes:
        """JSON of everything; :meth:`from_bytes` is the inverse."""
        keys = ("chunk", "action_dim", "scale", "minimum", "maximum")
        return json.dumps({key: getattr(self, key) for key in keys} | {"bpe": self.bpe.to_str()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> DCTTokenizer:
        """Inverse of :meth:`to_bytes`.

        Raises:
            ValueError: not the bytes of a tokenizer.
        """
        try:
            values = json.loads(data)
            bpe = values.pop("bpe")
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"not a saved DCTTokenizer ({error!r}); write the file with DCTTokenizer.save") from error
        return cls(**values, bpe=_tokenizers().Tokenizer.from_str(bpe))

    def save(self, path: str | Path) -> None:
        """Write :meth:`to_bytes` to a file: the head option ``vocabulary``."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> DCTTokenizer:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: no such file, or it holds something else.
        """
        if not Path(path).is_file():
            raise ValueError(f"vocabulary={str(path)!r}: no such file; write it with DCTTokenizer.fit(...).save(path)")
        return cls.from_bytes(Path(path).read_bytes())


def episode_chunks(actions: Tensor, chunk: int) -> Tensor:
    """Every full window of one episode's normalised actions ``[N, A]``: ``[N - T + 1, T, A]``, for :meth:`fit`.

    Args:
        actions: of one episode, for example the ``action`` rows of a LeRobotDataset with one ``episode_index``, through
            ``schema.to_internal`` and ``normalizer.normalize_action``.
        chunk: T.

    Example:
        >>> episode_chunks(torch.arange(4.0).unsqueeze(1), 3).squeeze(-1).tolist()
        [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    """
    if len(actions) < chunk:
        return actions.new_empty(0, chunk, actions.shape[1])
    return actions.unfold(0, chunk, 1).transpose(1, 2)


def _alphabet(size: int) -> list[str]:
    return [chr(code) for code in range(size)]


def _without_merges(size: int):
    """A BPE without merges: token i is character i."""
    tokenizers = _tokenizers()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(_alphabet(size))}, []))
    bpe.decoder = tokenizers.decoders.Fuse()
    return bpe


def _tokenizers():
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(f"the DCT tokenizer needs the package tokenizers: {INSTALL}") from error
    return tokenizers
