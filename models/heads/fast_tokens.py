"""An autoregressive head: actions as tokens, predicted one after the other by a small causal transformer.

Shape suffixes: B samples, N positions, L action tokens, V vocabulary, T chunk, A action dims, D width.

::

    tokens of every segment --project, + position--> context --------cross-attention--------+
    [BOS, state, token 0 .. token L-2] --> depth x (causal self-attention, cross-attention, MLP) --> logits
                 |        |                                                                     |  |
                 +--------+---------------------- position i + 1 predicts token i --------------+--+

Sources: OpenVLA (arXiv 2406.09246) for binned actions; FAST (arXiv 2501.09747) for compressed ones; see
:mod:`models.action_tokenizers`. The language model of those works stays frozen here and shared between tenants; this
private decoder takes the place of its fine-tuned copy.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from models.action_tokenizers import BinningTokenizer, DCTTokenizer
from models.heads.flow_matching import Attention, Context
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import TenantSchema

TOKENIZERS = ("binning", "dct")
#: Spatial segments are averaged down to at most this many tokens per side, to bound the cost of cross-attention.
POOL_GRID = 8
#: Positions before the first action token: BOS and the state.
PREFIX = 2


class FastTokensHead(ActionHead):
    """Cross-entropy on action tokens; greedy or sampled decoding; exact categorical likelihood for RL.

    ``binning``: T*A tokens, one per action element. SFT and RL: the log-probability of an element is that of its token
    given the elements before it; the chunk's sum is exact.

    ``dct``: FAST, at most :attr:`DCTTokenizer.max_tokens` tokens and an end token. SFT only: a token belongs to no
    single action element, so there is no log-probability per executed step.

    Padded steps: with ``binning`` their tokens carry no loss and are hidden from the others. With ``dct`` a coefficient
    mixes all steps, so padded ones repeat the last valid action before the transform, and the loss covers all tokens
    of that chunk; what the padding held never matters. A chunk of padding only carries no loss.

    Args:
        feature_spec: of the backbone, kind ``tokens``.
        schema: of the tenant. Both tokenizers expect actions in [-1, 1]: ``binning`` clamps what lies outside.
        tokenizer: ``binning`` or ``dct``.
        bins: of ``binning``.
        dim: width D.
        depth: decoder blocks.
        num_heads: attention heads.
        vocabulary: ``dct``: file written by :meth:`DCTTokenizer.save`. Without it every integer is a token (no merges),
            which needs no data. The payload holds the tokenizer's bytes as well.
        pretrained: ``dct``: instead, a FAST processor of Hugging Face (name or folder) that is already on this machine.

    Raises:
        ValueError: an option is none of its choices, or does not fit the schema.
    """

    reads = ("tokens",)
    supports_rl = True

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        tokenizer: Literal["binning", "dct"] = "binning",
        bins: int = 256,
        dim: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        vocabulary: str | None = None,
        pretrained: str | None = None,
    ) -> None:
        super().__init__(feature_spec, schema)
        if tokenizer not in TOKENIZERS:
            raise ValueError(f"tokenizer={tokenizer!r}: choose one of {', '.join(TOKENIZERS)}")
        for key, value in (("dim", dim), ("depth", depth), ("num_heads", num_heads)):
            if value < 1:
                raise ValueError(f"{key}={value}: must be at least 1")
        if dim % num_heads or dim % 4:
            raise ValueError(f"dim={dim}: must be a multiple of num_heads={num_heads} and of 4")
        if tokenizer == "binning":
            if vocabulary is not None or pretrained is not None:
                raise ValueError("vocabulary and pretrained belong to tokenizer=dct: leave them out with binning")
            if schema.action_normalization == "mean_std":
                raise ValueError(
                    "tokenizer=binning covers [-1, 1], and schema.action_normalization=mean_std maps a third of the "
                    "actions outside; use min_max, or identity for actions that are in [-1, 1]"
                )
            self.tokenizer = BinningTokenizer(bins)
            self.num_tokens = schema.chunk * schema.action_dim
            vocab_size = bins
        else:
            self.tokenizer = _dct_tokenizer(schema, vocabulary, pretrained)
            self.num_tokens = self.tokenizer.max_tokens
            vocab_size = self.tokenizer.vocab_size + 1  # the end token comes last
        #: Of this instance: the class can, with ``binning``.
        self.supports_rl = tokenizer == "binning"  # pyright: ignore[reportAttributeAccessIssue]
        self.context = Context(feature_spec.segments, dim, POOL_GRID)
        self.begin = nn.Parameter(0.02 * torch.randn(dim))
        self.embed_state = nn.Linear(schema.state_dim, dim)
        self.embed_token = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed_token.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(PREFIX + self.num_tokens - 1, dim))
        self.blocks = nn.ModuleList(_Block(dim, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, vocab_size)
        if self.supports_rl:
            self.value_head = _Critic(feature_spec.pooled_dim + schema.state_dim, dim)

    @classmethod
    def rl_problem(cls, arguments: dict) -> str | None:
        """See :meth:`ActionHead.rl_problem`."""
        if arguments.get("tokenizer", "binning") != "binning":
            return f"tokenizer={arguments['tokenizer']} has no log-probability per action step; use tokenizer=binning"
        return None

    @property
    def noise_shape(self) -> tuple[int, ...]:
        """One standard normal number per token: ``(T, A)`` for ``binning``, ``(L,)`` for ``dct``."""
        return (self.schema.chunk, self.schema.action_dim) if self.supports_rl else (self.num_tokens,)

    @property
    def trace_shapes(self) -> dict[str, tuple[int, ...]]:
        """``tokens`` ``(T*A,)`` int64 for ``binning``; nothing for ``dct``."""
        return {"tokens": (self.num_tokens,)} if self.supports_rl else {}

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Cross-entropy per counted token; see the class docstring for padded steps.

        Metrics: ``accuracy``, the share of counted tokens that the most likely ones, given those before, get right.
        """
        tokens_BL, counted_BL = self._targets(actions, is_pad)
        logits_BLV = self._logits(features, state, tokens_BL)
        losses_BL = F.cross_entropy(logits_BLV.transpose(1, 2), tokens_BL, reduction="none")
        num_counted = counted_BL.sum().clamp(min=1)
        right_BL = (logits_BLV.detach().argmax(-1) == tokens_BL) & counted_BL
        return {"loss": (losses_BL * counted_BL).sum() / num_counted, "accuracy": right_BL.sum() / num_counted}

    def loss_elements(self, actions: Tensor, is_pad: Tensor) -> Tensor:
        """Tokens that count; see :meth:`ActionHead.loss_elements`."""
        return self._targets(actions, is_pad)[1].sum(-1)

    def act(self, features: VLAFeature, state: Tensor, noise: Tensor | None = None) -> TensorDict:
        """Greedy decoding, or exact sampling: token i is the ``Phi(noise_i)`` quantile of its distribution.

        See :meth:`ActionHead.act`.
        """
        tokens_BL, log_probs_BL = self._generate(features, state, None if noise is None else noise.flatten(1))
        out = TensorDict({"chunk": self._decode(tokens_BL).to(state)}, batch_size=[len(state)])
        if self.supports_rl:
            out["state_value"] = self.value(features, state)
            if noise is not None:
                out["log_probs"] = self._per_element(log_probs_BL)
                out["trace"] = TensorDict({"tokens": tokens_BL}, batch_size=[len(state)])
        return out

    def evaluate(self, features: VLAFeature, state: Tensor, sample: TensorDict) -> tuple[Tensor, Tensor]:
        """One teacher-forced pass over the tokens of ``sample["trace"]``; see :meth:`ActionHead.evaluate`.

        The entropy of an element is that of its token given the sampled tokens before it.

        Raises:
            ValueError: the tokenizer is ``dct``.
        """
        self._require_rl()
        tokens_BL = sample["trace", "tokens"]
        all_BLV = self._logits(features, state, tokens_BL).log_softmax(-1)
        log_probs_BL = all_BLV.gather(-1, tokens_BL.unsqueeze(-1)).squeeze(-1)
        entropy_BL = -(all_BLV.exp() * all_BLV).sum(-1)
        return self._per_element(log_probs_BL), self._per_element(entropy_BL)

    def value(self, features: VLAFeature, state: Tensor) -> Tensor:
        """See :meth:`ActionHead.value`; its own MLP on the pooled feature and the state.

        Raises:
            ValueError: the tokenizer is ``dct``.
        """
        self._require_rl()
        return self.value_head(features, state)

    def q_network(self, action_size: int) -> nn.Module:
        """See :meth:`ActionHead.q_network`."""
        return _Critic(self.feature_spec.pooled_dim + self.schema.state_dim + action_size, self.begin.shape[-1])

    def get_extra_state(self) -> Tensor:
        """The tokenizer as uint8 bytes: a payload restores the head with the vocabulary that it was trained with."""
        data = self.tokenizer.to_bytes() if isinstance(self.tokenizer, DCTTokenizer) else b"binning"
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Inverse of :meth:`get_extra_state`.

        Raises:
            ValueError: the payload's tokenizer has another vocabulary or sequence length than this head.
        """
        data = bytes(state.cpu().tolist())
        if isinstance(self.tokenizer, BinningTokenizer):
            if data != b"binning":
                raise ValueError("the payload was trained with tokenizer=dct; build the head with it")
            return
        tokenizer = DCTTokenizer.from_bytes(data)
        if (tokenizer.vocab_size, tokenizer.max_tokens) != (self.tokenizer.vocab_size, self.tokenizer.max_tokens):
            raise ValueError(
                f"the payload's tokenizer has {tokenizer.vocab_size} tokens and sequences of {tokenizer.max_tokens}, "
                f"this head {self.tokenizer.vocab_size} and {self.tokenizer.max_tokens}: give its vocabulary"
            )
        self.tokenizer = tokenizer

    # --------------------------------------------------------------------------------------- tokens

    def _targets(self, actions_BTA: Tensor, is_pad_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Target tokens ``[B, L]`` and which of them count; what padded steps hold does not matter."""
        valid_BT = ~is_pad_BT
        actions_BTA = torch.where(valid_BT.unsqueeze(-1), actions_BTA, torch.zeros_like(actions_BTA)).detach()
        if isinstance(self.tokenizer, BinningTokenizer):
            counted_BL = valid_BT.unsqueeze(-1).expand_as(actions_BTA).flatten(1)
            return self.tokenizer.encode(actions_BTA).flatten(1), counted_BL
        steps = torch.arange(actions_BTA.shape[1], device=is_pad_BT.device)
        last_valid_BT = torch.where(valid_BT, steps, 0).cummax(1).values
        repeated_BTA = actions_BTA.gather(1, last_valid_BT.unsqueeze(-1).expand_as(actions_BTA))
        rows = []
        for sequence in self.tokenizer.encode(repeated_BTA):
            # Every position after the end token is an end token that does not count.
            rows.append(sequence + [self.tokenizer.vocab_size] * (self.num_tokens - len(sequence)))
        tokens_BL = torch.tensor(rows, device=actions_BTA.device)
        ended_BL = (tokens_BL == self.tokenizer.vocab_size).long()
        counted_BL = (ended_BL.cumsum(1) <= 1) & valid_BT.any(1, keepdim=True)
        return tokens_BL, counted_BL

    def _decode(self, tokens_BL: Tensor) -> Tensor:
        if isinstance(self.tokenizer, BinningTokenizer):
            return self._per_element(self.tokenizer.decode(tokens_BL))
        end = self.tokenizer.vocab_size
        rows = tokens_BL.tolist()
        return self.tokenizer.decode([row[: row.index(end)] if end in row else row for row in rows])

    def _per_element(self, values_BL: Tensor) -> Tensor:
        return values_BL.unflatten(1, (self.schema.chunk, self.schema.action_dim))

    def _require_rl(self) -> None:
        if not self.supports_rl:
            raise ValueError("tokenizer='dct' has no log-probability per action step; use tokenizer=binning for RL")

    # -------------------------------------------------------------------------------------- decoder

    def _logits(self, features: VLAFeature, state: Tensor, tokens_BL: Tensor) -> Tensor:
        """Teacher forcing: logits ``[B, L, V]`` of every token given the tokens before it."""
        tokens_BND = self.embed_token(tokens_BL[:, :-1]) + self.position[PREFIX:]
        x_BND = torch.cat([self._prefix(state), tokens_BND], dim=1)
        return self._run(x_BND, self._memory(features))[:, PREFIX - 1 :]

    @torch.no_grad()
    def _generate(self, features: VLAFeature, state: Tensor, noise_BL: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, L]`` and their log-probabilities; greedy without noise.

        Keys and values of earlier positions are kept (in a local variable: other threads decode with the same module),
        so that a token costs one position through the blocks.
        """
        memory = self._memory(features)
        caches = [_Cache(len(self.position)) for _ in self.blocks]
        x_BND = self._prefix(state)
        end = None if self.supports_rl else self.tokenizer.vocab_size
        ended_B = torch.zeros(len(state), dtype=torch.bool, device=state.device)
        tokens, log_probs = [], []
        for index in range(self.num_tokens):
            logits_BV = self._run(x_BND, memory, caches)[:, -1]
            token_B = logits_BV.argmax(-1) if noise_BL is None else _quantile(logits_BV, noise_BL[:, index])
            tokens.append(token_B)
            log_probs.append(logits_BV.log_softmax(-1).gather(-1, token_B.unsqueeze(-1)).squeeze(-1))
            if end is not None:
                ended_B |= token_B == end
                if ended_B.all():
                    break
            if index + 1 < self.num_tokens:
                x_BND = (self.embed_token(token_B) + self.position[PREFIX + index]).unsqueeze(1)
        return torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1)

    def _prefix(self, state: Tensor) -> Tensor:
        begin_BD = self.begin.expand(len(state), -1)
        return torch.stack([begin_BD, self.embed_state(state)], dim=1) + self.position[:PREFIX]

    def _memory(self, features: VLAFeature) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and mask of the cross-attention of each block: the same for every token."""
        context_BSD, mask_BS = self.context(features)
        return [(*block.cross.keys_values(context_BSD), mask_BS[:, None, None, :]) for block in self.blocks]

    def _run(
        self, x_BND: Tensor, memory: list[tuple[Tensor, Tensor, Tensor]], caches: list[_Cache] | None = None
    ) -> Tensor:
        """N new positions (after those in ``caches``) through the blocks: logits ``[B, N, V]``."""
        for index, block in enumerate(self.blocks):
            x_BND = block(x_BND, memory[index], None if caches is None else caches[index])
        return self.to_logits(self.norm(x_BND))


class _Block(nn.Module):
    """Causal self-attention, cross-attention, MLP; normalised first."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm_self, self.norm_cross, self.norm_mlp = (nn.LayerNorm(dim) for _ in range(3))
        self.attention = Attention(dim, num_heads)
        self.cross = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x_BND: Tensor, memory: tuple[Tensor, Tensor, Tensor], cache: _Cache | None) -> Tensor:
        h_BND = self.norm_self(x_BND)
        keys, values = self.attention.keys_values(h_BND)
        if cache is not None:
            keys, values = cache.extend(keys, values)
        num, total = x_BND.shape[1], keys.shape[2]
        # The last position sees all ``total`` keys, the one before it all but one, and so on.
        causal = torch.ones(num, total, dtype=torch.bool, device=x_BND.device).tril(total - num)
        x_BND = x_BND + self.attention(h_BND, keys, values, causal)
        x_BND = x_BND + self.cross(self.norm_cross(x_BND), *memory)
        return x_BND + self.mlp(self.norm_mlp(x_BND))


class _Cache:
    """Keys and values ``[B, heads, N, D / heads]`` of the positions so far, in buffers of full length."""

    def __init__(self, length: int) -> None:
        self.length, self.used = length, 0
        self.keys = self.values = torch.empty(0)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append new positions; returns all so far."""
        if not self.used:
            shape = (*keys.shape[:2], self.length, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        new = slice(self.used, self.used + keys.shape[2])
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        self.used = new.stop
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


class _Critic(nn.Module):
    """Pooled feature (normalised per sample) and state -> value ``[B, 1]``."""

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, dim), nn.SiLU(), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, features: VLAFeature, state: Tensor) -> Tensor:
        pooled = features.pooled.to(state.dtype)
        return self.mlp(torch.cat([F.layer_norm(pooled, pooled.shape[-1:]), state], dim=-1))


def _quantile(logits_BV: Tensor, noise_B: Tensor) -> Tensor:
    """Exact draws: the first token whose cumulative probability reaches ``Phi(noise)``.

    In double precision, where neither the sum over a large vocabulary nor Phi of a large number rounds to 1 early.
    """
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    uniform_B1 = torch.special.ndtr(noise_B.double()).unsqueeze(-1)
    return torch.searchsorted(cumulative_BV, uniform_B1).squeeze(-1).clamp(max=logits_BV.shape[-1] - 1)


def _dct_tokenizer(schema: TenantSchema, vocabulary: str | None, pretrained: str | None) -> DCTTokenizer:
    if vocabulary is not None and pretrained is not None:
        raise ValueError(f"vocabulary={vocabulary!r} and pretrained={pretrained!r}: give at most one of them")
    if pretrained is not None:
        return DCTTokenizer.from_pretrained(pretrained, schema.chunk, schema.action_dim)
    if vocabulary is None:
        return DCTTokenizer(schema.chunk, schema.action_dim)
    tokenizer = DCTTokenizer.load(vocabulary)
    if (tokenizer.chunk, tokenizer.action_dim) != (schema.chunk, schema.action_dim):
        raise ValueError(
            f"vocabulary={vocabulary!r} is for chunks [{tokenizer.chunk}, {tokenizer.action_dim}], "
            f"the schema has [{schema.chunk}, {schema.action_dim}]: fit another one"
        )
    return tokenizer
