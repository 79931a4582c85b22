"""Shared base of the frozen vision-language backbones from ``transformers``.

Shape suffixes: B samples, L prompt tokens (images, text, action tokens), D width, N decoder layers, T chunk,
P position axes (3 for the multimodal rotary positions of Qwen, else 1).

::

    images --vision tower--> image tokens --+                                      +--> sequence [B,L,D], pooled [B,D]
    prompt --embedding-----> text tokens  --+--> layer 0 --> ... --> layer N-1 --> norm
    T action tokens (only when asked) ------+      |  |                            +--> action [B,T,D]
                                                   |  +--> kv [B,L,N*2*heads*head_dim]: keys (rotated) and values
                                                   +-----> layers [B,L,n*D]: hidden states entering a layer

The decoder layers run in a loop here instead of inside the library's ``forward``: the same loop serves a head that
continues the backbone (:meth:`VLMBackbone.run_layers`), gives the states of the chosen layers only, keeps nothing on
the shared module, and always passes explicit positions and an explicit mask, so that padding (left, right, any length)
changes no sample. A test holds it equal to the library's ``forward``.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from models.backbones import tiny
from models.backbones.sizes import checkpoint_config, unreachable
from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature, check_observation
from nexus_lightning.features.graphs import replay
from nexus_lightning.schema import TenantSchema

INSTALL = "pip install 'nexus-lightning[backbone]'"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: A float16 feature store holds whole numbers exactly up to here.
LARGEST_POSITION = 2048


class VLMBackbone(Backbone):
    """A frozen ``transformers`` vision-language model; base of the classes that a config names.

    Kinds and segments (zeros on padding, mask False there):

    - ``tokens``: ``sequence`` ``[B, L, D]``, the last hidden states (after the final norm) of the whole prompt.
    - ``pooled``: their masked mean ``[B, D]`` (also there with every other kind).
    - ``action_tokens``: ``action`` ``[B, T, D]``, the last hidden states at ``schema.chunk`` copies of one existing,
      rarely used token at the end of the prompt (OpenVLA-OFT, arXiv 2502.19645; here under the model's own causal
      mask, so a later action token sees the earlier ones). Only causal models give it.
    - ``layer_states``: ``layers``, the hidden states *entering* the layers that ``layers`` names, layout ``(n, D)``;
      and ``positions`` ``[B, L, P]`` (whole numbers), which :meth:`run_layers` needs.
    - ``kv``: ``kv``, layout ``(N, 2, kv_heads, head_dim)``: keys (rotary positions applied), values of every layer. The
      cache object behind them is made per call and dropped.

    Args:
        pretrained: a hub name, a local checkpoint folder, or ``tiny``: a random-weight checkpoint of this architecture,
            built in code and loaded the same way (plumbing tests only).
        dtype: ``bf16`` or ``fp32``: of weights, computation and features.
        num_layers: keep only the first n decoder layers (SmolVLA keeps half of them); None keeps all. The last hidden
            state is then that of layer n, still through the model's own final norm: what the library's model gives when
            its layer list is cut, and what SmolVLA does. A head that wants it before the norm reads ``layer_states`` of
            a model that keeps one layer more.
        layers: which layers' entering states ``layer_states`` holds, in this order; None gives all. A head that adapts
            the last k layers asks for ``[N - k]`` alone.
        padding_side: ``left`` or ``right``: where shorter prompts of a batch are padded. Never changes a feature.
        max_text_tokens: longest instruction (with the schema's prompt around it), in tokens.
        image_size: the square that images are resized to, once, in :meth:`preprocess`; None leaves the size to the
            checkpoint's own image processor.
        chat: True puts the checkpoint's own chat template around images and text; False: the images, then the text.
        seed: of the random weights of ``tiny``.

    Raises:
        ValueError: an option is none of its choices or does not fit the architecture; the message names it.
        OSError: the checkpoint cannot be reached; the message says what to do.
        ImportError: transformers is missing; the message has the install line.
    """

    kinds = ("tokens", "pooled", "action_tokens", "layer_states", "kv")
    #: ``model_type`` in the config of the checkpoints that this class loads.
    architecture: ClassVar[str] = ""
    #: Name of the vocabulary's token that is repeated for ``action_tokens``.
    action_token: ClassVar[str | None] = None
    #: Whether a token sees only what is before it; else the whole prompt sees itself.
    causal: ClassVar[bool] = True
    #: Position axes P.
    position_dim: ClassVar[int] = 1

    def __init__(
        self,
        pretrained: str,
        dtype: Literal["bf16", "fp32"] = "bf16",
        num_layers: int | None = None,
        layers: Sequence[int] | None = None,
        padding_side: Literal["left", "right"] = "right",
        max_text_tokens: int = 256,
        image_size: int | None = None,
        chat: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_options(dtype, padding_side, max_text_tokens)
        # Loading may draw random numbers for weights that it then overwrites.
        with torch.random.fork_rng(devices=[]):
            model, processor = self._load(pretrained, DTYPES[dtype], seed)
        self._set_up(model, processor, pretrained, num_layers, layers, padding_side, max_text_tokens, image_size, chat)

    @classmethod
    def on_meta(cls, **arguments: Any) -> VLMBackbone:
        """The same architecture without weights, processor or network: for feature specs, counts and memory.

        Args:
            arguments: as the constructor's (the keys of a YAML in ``conf/backbone`` without ``_target_``).

        Returns:
            A backbone on ``torch.device("meta")``; it cannot preprocess or encode.

        Example:
            >>> from models.backbones.qwen_vl import Qwen3VL
            >>> Qwen3VL.on_meta(pretrained="Qwen/Qwen3-VL-4B-Instruct").memory()["parameters"]
            4437815808
        """
        bound = inspect.signature(cls).bind(**arguments)
        bound.apply_defaults()
        options = bound.arguments
        _check_options(options["dtype"], options["padding_side"], options["max_text_tokens"])
        from transformers import AutoModel

        pretrained = options["pretrained"]
        config = tiny.tiny_config(cls.architecture) if pretrained == "tiny" else checkpoint_config(pretrained)
        cls._check_architecture(config, pretrained)
        with torch.device("meta"):
            model = AutoModel.from_config(
                config, dtype=DTYPES[options["dtype"]], attn_implementation=_attention(config)
            )
        backbone = cls.__new__(cls)
        Backbone.__init__(backbone)
        backbone._set_up(
            model, None, pretrained, **{k: v for k, v in options.items() if k not in ("pretrained", "dtype", "seed")}
        )
        return backbone

    def _load(self, pretrained: str, dtype: torch.dtype, seed: int) -> tuple[nn.Module, Any]:
        if pretrained != "tiny":
            return self._from_pretrained(pretrained, dtype)
        with tempfile.TemporaryDirectory() as folder, tiny.no_progress_bars():
            tiny.build_checkpoint(self.architecture, folder, seed)
            return self._from_pretrained(folder, dtype)

    def _from_pretrained(self, pretrained: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
        try:
            from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
        except ImportError as error:
            raise ImportError(f"backbone {self.architecture} needs transformers: {INSTALL}") from error
        try:
            config = AutoConfig.from_pretrained(pretrained)
            self._check_architecture(config, pretrained)
            # The class that published checkpoints are saved from: the library renames older weight names for it, not
            # always for the headless one. The head itself is dropped: no feature needs it.
            model, report = AutoModelForImageTextToText.from_pretrained(
                pretrained, dtype=dtype, attn_implementation=_attention(config), output_loading_info=True
            )
            processor = AutoProcessor.from_pretrained(pretrained)
        except OSError as error:
            raise OSError(unreachable(pretrained)) from error
        missing = sorted(key for key in report["missing_keys"] if not key.startswith("lm_head"))
        missing += sorted(str(key) for key in report["mismatched_keys"])
        if missing:
            raise ValueError(
                f"pretrained={pretrained!r}: {len(missing)} weights are missing or of another shape, "
                f"first {missing[0]!r}; download the checkpoint again"
            )
        return model.model, processor

    @classmethod
    def _check_architecture(cls, config: Any, pretrained: str) -> None:
        if config.model_type != cls.architecture:
            raise ValueError(
                f"pretrained={pretrained!r}: its config says {config.model_type!r}, {cls.__name__} loads "
                f"{cls.architecture!r} checkpoints; use the backbone class of that architecture"
            )

    def _set_up(
        self,
        model: nn.Module,
        processor: Any,
        pretrained: str,
        num_layers: int | None,
        layers: Sequence[int] | None,
        padding_side: str,
        max_text_tokens: int,
        image_size: int | None,
        chat: bool,
    ) -> None:
        self.model = model
        self.processor = processor
        self.padding_side, self.max_text_tokens, self.chat = padding_side, max_text_tokens, chat
        if pretrained == "tiny":
            #: One line for the start banner of a run.
            self.banner = f"tiny {self.architecture}: {tiny.BANNER}"
        # The library's fast tokenizers are not safe under threads (a call may change their padding state).
        self._processor_lock = threading.Lock()

        decoder = self.decoder_layers()
        if num_layers is not None and not 1 <= num_layers <= len(decoder):
            raise ValueError(f"num_layers={num_layers}: must be 1 to {len(decoder)} for {pretrained}, or null for all")
        if num_layers is not None:
            del decoder[num_layers:]
            self.text_config.num_hidden_layers = num_layers
        count = len(decoder)
        self.state_layers = tuple(range(count)) if layers is None else tuple(layers)
        if not self.state_layers or any(not 0 <= layer < count for layer in self.state_layers):
            raise ValueError(f"layers={list(self.state_layers)}: name layers 0 to {count - 1}, or null for all")
        if image_size is not None:
            self._check_image_size(image_size)
        self.image_size = image_size
        if processor is not None:
            if chat and not processor.chat_template:
                raise ValueError(f"chat=True: {pretrained} has no chat template; set chat: false")
            self._prepare_processor()
        self.config = {
            "architecture": self.architecture,
            "model": _comparable(model.config.to_dict()),
            "processor": None if processor is None else _describe(processor),
            "num_layers": count,
            "layers": list(self.state_layers),
            "image_size": image_size,
            "chat": chat,
            "action_token": self.action_token,
        }
        self.freeze()

    # What differs between architectures.

    @property
    def text_model(self) -> nn.Module:
        """The language model inside: embedding, ``layers``, ``norm``, ``rotary_emb``."""
        return self.model.language_model

    @property
    def first_plain_layer(self) -> int:
        """The first decoder layer from where on nothing but the hidden state goes in (see :meth:`run_layers`)."""
        return 0

    def _check_image_size(self, image_size: int) -> None:
        """Refuse an ``image_size`` that the vision tower cannot take."""
        raise NotImplementedError

    def _prepare_processor(self) -> None:
        """Set the processor up for ``image_size``."""

    def _plain_prompt(self, text: str, num_images: int) -> str:
        """The prompt without a chat template: image placeholders, then the text."""
        raise NotImplementedError

    def _process(self, prompts: list[str], images: list[list[Tensor]] | None) -> tuple[list[list[int]], dict]:
        """Token ids per sample (image placeholders expanded, no padding), and image tensors with B in front."""
        raise NotImplementedError

    def _positions(self, inputs: TensorDict) -> Tensor:
        """``[B, L, P]`` int64 from the padded prompt on the CPU; 0 on padding."""
        mask = inputs["attention_mask"]
        return ((mask.cumsum(1) - 1) * mask).unsqueeze(-1)

    def _embed(self, inputs: TensorDict) -> tuple[Tensor, list[Tensor]]:
        """Hidden states ``[B, L, D]`` that enter layer 0, and what is added after the first layers (``[B, L, D]``)."""
        raise NotImplementedError

    def _rotary(self, hidden_BLD: Tensor, positions_BLP: Tensor) -> tuple[Tensor, Tensor]:
        return self.text_model.rotary_emb(hidden_BLD, positions_BLP[..., 0])

    # The contract.

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def width(self) -> int:
        return self.text_config.hidden_size

    def feature_spec(self, schema: TenantSchema, kind: str = "tokens") -> FeatureSpec:
        """See the class docstring.

        Raises:
            ValueError: a kind that this architecture does not give.
        """
        self._check_kinds((kind,))
        config, width = self.text_config, self.width
        count = len(self.decoder_layers())
        segments: tuple[FeatureSegment, ...] = ()
        if kind == "tokens":
            segments = (FeatureSegment("sequence", width),)
        elif kind == "action_tokens":
            segments = (FeatureSegment("action", width, length=schema.chunk),)
        elif kind == "layer_states":
            chosen = len(self.state_layers)
            segments = (
                FeatureSegment("layers", chosen * width, layout=(chosen, width)),
                FeatureSegment("positions", self.position_dim),
            )
        elif kind == "kv":
            head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
            layout = (count, 2, config.num_key_value_heads, head_dim)
            segments = (FeatureSegment("kv", count * 2 * config.num_key_value_heads * head_dim, layout=layout),)
        return FeatureSpec(kind, segments, width)

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("tokens",),
    ) -> TensorDict:
        """Resize, prompt, tokenise, pad; see :meth:`Backbone.preprocess`.

        Returns:
            TensorDict ``[B]``: ``input_ids`` int64 and ``attention_mask`` bool ``[B, L]``, ``position_ids`` int64
            ``[B, L, P]``, ``action_mask`` bool ``[B, L]`` when action tokens were asked for, and with cameras
            ``pixel_values`` (and what else the vision tower needs).

        Raises:
            ValueError: wrong cameras or sizes, a wrong number of instructions, one that is too long or that holds an
                image placeholder, an unknown kind.
        """
        check_observation(observation, schema, instructions)
        self._check_kinds(kinds)
        batch = len(instructions)
        texts = [schema.instruct(instruction) for instruction in instructions]
        images = None
        if schema.cameras:
            resized = {camera: self._resize(observation["image", camera]) for camera in schema.cameras}
            images = [[resized[camera][row] for camera in schema.cameras] for row in range(batch)]
        with self._processor_lock:
            self._check_texts(texts)
            prompts = {text: self._prompt(text, len(schema.cameras)) for text in texts}
            rows, vision = self._process([prompts[text] for text in texts], images)
        num_actions = schema.chunk if "action_tokens" in kinds else 0
        if num_actions:
            rows = [row + [self._action_token_id] * num_actions for row in rows]
        longest = max(len(row) for row in rows)
        limit = self.text_config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"prompt of {longest} tokens exceeds {self._name}'s limit of {limit}; use fewer cameras, a smaller "
                f"image_size or a shorter instruction"
            )
        lengths = torch.tensor([len(row) for row in rows])
        places = torch.arange(longest)
        if self.padding_side == "left":
            places = places - (longest - lengths[:, None])
        mask = (places >= 0) & (places < lengths[:, None])
        ids = torch.zeros(batch, longest, dtype=torch.long)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        inputs = TensorDict({"input_ids": ids, "attention_mask": mask, **vision}, batch_size=[batch])
        if num_actions:
            inputs["action_mask"] = mask & (places >= lengths[:, None] - num_actions)
        inputs["position_ids"] = self._positions(inputs)
        if "layer_states" in kinds and int(inputs["position_ids"].max()) > LARGEST_POSITION:
            raise ValueError(
                f"prompt with position {int(inputs['position_ids'].max())}: layer_states carries positions, which the "
                f"feature store keeps exactly only up to {LARGEST_POSITION}; use a smaller image_size or fewer cameras"
            )
        return inputs

    # inference_mode(False): the feature may later be an input of training, which refuses inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("tokens",)) -> VLAFeature:
        """One pass for all ``kinds``; see :meth:`Backbone.encode` and the class docstring.

        Raises:
            ValueError: an unknown kind, or ``action_tokens`` that :meth:`preprocess` was not asked for.
        """
        self._check_kinds(kinds)
        if "action_tokens" in kinds and "action_mask" not in inputs.keys():
            raise ValueError("kinds=action_tokens: the prompt has none; pass the same kinds to preprocess")
        from transformers import DynamicCache

        mask_BL, positions_BLP = inputs["attention_mask"], inputs["position_ids"]
        valid_BL1 = mask_BL.unsqueeze(-1)
        hidden_BLD, additions = self._embed(inputs)
        cache = DynamicCache() if "kv" in kinds else None
        states: dict[int, Tensor] = {}
        wanted = set(self.state_layers) if "layer_states" in kinds else set()

        def keep(index: int, entering_BLD: Tensor) -> None:
            if index in wanted:
                states[index] = entering_BLD

        layers = self.decoder_layers()
        if cache is None and not wanted:
            hidden_BLD = replay(
                "decoder",
                lambda hidden, mask, positions, *added: self._run(layers, hidden, mask, positions, additions=added),
                *(hidden_BLD, mask_BL, positions_BLP, *additions),
            )
        else:
            hidden_BLD = self._run(layers, hidden_BLD, mask_BL, positions_BLP, cache, keep, additions)
        hidden_BLD = hidden_BLD * valid_BL1
        tokens, mask = {}, {}
        if "tokens" in kinds:
            tokens["sequence"], mask["sequence"] = hidden_BLD, mask_BL
        if "action_tokens" in kinds:
            action_BL = inputs["action_mask"]
            tokens["action"] = hidden_BLD[action_BL].unflatten(0, (len(hidden_BLD), -1))
            mask["action"] = torch.ones(tokens["action"].shape[:2], dtype=torch.bool, device=mask_BL.device)
        if wanted:
            tokens["layers"] = torch.cat([states[index] for index in self.state_layers], dim=-1) * valid_BL1
            tokens["positions"] = (positions_BLP * valid_BL1).float()
            mask["layers"] = mask["positions"] = mask_BL
        if cache is not None:
            # [N, 2, B, heads, L, head_dim] -> [B, L, N, 2, heads, head_dim]
            kv = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
            tokens["kv"] = kv.permute(2, 4, 0, 1, 3, 5).flatten(2) * valid_BL1
            mask["kv"] = mask_BL
        # Summed in float32: bfloat16 sums over hundreds of tokens lose the mean.
        pooled = hidden_BLD.float().sum(1) / valid_BL1.sum(1)
        size = inputs.batch_size
        return VLAFeature(
            tokens=TensorDict(tokens, batch_size=size),
            mask=TensorDict(mask, batch_size=size),
            pooled=pooled.to(hidden_BLD.dtype),
            batch_size=size,
        )

    # For heads that continue the backbone (SharedBackbone.backbone): frozen layers, run privately.

    def decoder_layers(self) -> nn.ModuleList:
        """The frozen decoder layers of the language model, in order. Shared by all tenants: never change them.

        A head that adds private weights beside theirs makes its own module that shares the frozen parameters (for
        example ``copy.deepcopy(layer, memo)`` with the parameters in ``memo``) and hands it to :meth:`run_layers`;
        swapping weights inside these modules, even for one call, would reach other threads.
        """
        return self.text_model.layers

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last decoder layer."""
        return self.text_model.norm

    def run_layers(
        self,
        start: int,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        positions_BLP: Tensor | None = None,
        layers: Sequence[Callable[..., Tensor]] | None = None,
    ) -> Tensor:
        """Layers ``start`` to the last and the final norm on given hidden states. Gradients flow through, never into.

        With ``hidden`` and ``positions`` of the kind ``layer_states`` this gives the kind ``tokens``.

        Args:
            start: index of the first layer to run; ``len(decoder_layers())`` applies the final norm alone.
            hidden_BLD: hidden states entering layer ``start``, any float dtype (computed in the backbone's).
            mask_BL: bool, True for real tokens.
            positions_BLP: the feature's ``positions``. None counts the real tokens, which is right for models with one
                position axis only.
            layers: callables that take the place of ``decoder_layers()[start:]``, called like those
                (``layer(hidden, attention_mask=..., position_embeddings=..., past_key_values=None, use_cache=False)``).

        Returns:
            ``[B, L, D]`` in the dtype of ``hidden_BLD``; padding holds unspecified finite numbers.

        Raises:
            ValueError: ``start`` is no layer, or a layer in which something besides the hidden state goes in (Qwen3-VL
                adds visual features after its first layers); or positions are needed and missing.
        """
        count = len(self.decoder_layers())
        if not self.first_plain_layer <= start <= count:
            raise ValueError(
                f"start={start}: {self._name} can be continued from layer {self.first_plain_layer} to {count} (visual "
                f"features are added after earlier layers); read layer_states with layers: [{self.first_plain_layer}] "
                f"or later"
            )
        chosen = list(self.decoder_layers()[start:]) if layers is None else list(layers)
        if len(chosen) != count - start:
            raise ValueError(f"layers has {len(chosen)} callables for the {count - start} layers from start={start}")
        if positions_BLP is None:
            if self.position_dim != 1:
                raise ValueError(f"positions_BLP=None: {self._name} needs the segment 'positions' of layer_states")
            positions_BLP = self._positions(TensorDict({"attention_mask": mask_BL}))
        out = self._run(chosen, hidden_BLD.to(self.dtype), mask_BL, positions_BLP.round().long())
        return out.to(hidden_BLD.dtype)

    def _run(
        self,
        layers: Sequence[Callable[..., Tensor]] | nn.ModuleList,
        hidden_BLD: Tensor,
        mask_BL: Tensor,
        positions_BLP: Tensor,
        cache: Any = None,
        keep: Callable[[int, Tensor], None] | None = None,
        additions: Sequence[Tensor] = (),
    ) -> Tensor:
        """The decoder loop: ``keep`` sees what enters each layer, ``additions[i]`` is added after layer i."""
        rotary = self._rotary(hidden_BLD, positions_BLP)
        attention = self._attention_mask(mask_BL, hidden_BLD.dtype)
        for index, layer in enumerate(layers):
            if keep is not None:
                keep(index, hidden_BLD)
            hidden_BLD = layer(
                hidden_BLD,
                attention_mask=attention,
                position_embeddings=rotary,
                past_key_values=cache,
                use_cache=cache is not None,
            )
            if index < len(additions):
                hidden_BLD = hidden_BLD + additions[index]
        return self.final_norm(hidden_BLD)

    def _attention_mask(self, mask_BL: Tensor, dtype: torch.dtype) -> Tensor:
        """Additive ``[B, 1, L, L]``. A padding token sees itself, so that no row of the softmax is empty."""
        length = mask_BL.shape[1]
        itself_LL = torch.eye(length, dtype=torch.bool, device=mask_BL.device)
        allowed_BLL = mask_BL.unsqueeze(1).expand(-1, length, -1)
        if self.causal:
            allowed_BLL = allowed_BLL.tril()
        blocked_BLL = ~(allowed_BLL | itself_LL)
        zeros = torch.zeros(blocked_BLL.shape, dtype=dtype, device=mask_BL.device)
        return zeros.masked_fill(blocked_BLL, torch.finfo(dtype).min).unsqueeze(1)

    # Bookkeeping.

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def memory(self) -> dict[str, int]:
        """``parameters`` (count) and ``bytes`` of the frozen weights as loaded (no language-model head)."""
        return {
            "parameters": sum(p.numel() for p in self.parameters()),
            "bytes": sum(p.numel() * p.element_size() for p in self.parameters()),
        }

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _action_token_id(self) -> int:
        tokenizer = self.processor.tokenizer
        token = tokenizer.get_vocab().get(self.action_token)
        if token is None:
            raise ValueError(f"kinds=action_tokens: the tokenizer has no {self.action_token!r} to repeat")
        return token

    def _check_kinds(self, kinds: Sequence[str]) -> None:
        for kind in kinds:
            if kind not in self.kinds:
                raise ValueError(f"kind={kind!r}: {self._name} gives {', '.join(self.kinds)}")

    def _check_texts(self, texts: Sequence[str]) -> None:
        tokenizer = self.processor.tokenizer
        for text in dict.fromkeys(texts):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) > self.max_text_tokens:
                raise ValueError(
                    f"instruction of {len(ids)} tokens exceeds {self._name}'s limit of {self.max_text_tokens} "
                    f"(max_text_tokens); shorten it: {text[:60]!r}..."
                )
            if self.image_token_id in ids:
                raise ValueError(f"instruction {text[:60]!r}: must not hold the model's image placeholder")

    @property
    def image_token_id(self) -> int:
        return self.model.config.image_token_id

    def _prompt(self, text: str, num_images: int) -> str:
        if not self.chat:
            return self._plain_prompt(text, num_images)
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=False,
            # SmolVLM's own method adds video options, and warns unless it finds a place for them.
            processor_kwargs={"padding": False},
        )

    def _resize(self, images: Tensor) -> Tensor:
        """uint8 ``[B, 3, H, W]`` on the CPU, resized to ``image_size`` when there is one and it differs."""
        from torchvision.transforms.v2 import InterpolationMode
        from torchvision.transforms.v2.functional import resize

        images = images.cpu()
        if self.image_size is None or images.shape[-1] == self.image_size:
            return images
        side = [self.image_size, self.image_size]
        return resize(images, side, interpolation=InterpolationMode.BICUBIC, antialias=True)

    def _scatter_images(self, inputs: TensorDict, hidden_BLD: Tensor, image_tokens: Tensor) -> Tensor:
        """Image tokens (all samples' in order, ``[tokens, D]``) into their placeholders' places."""
        places_BL1 = (inputs["input_ids"] == self.image_token_id).unsqueeze(-1) & inputs["attention_mask"].unsqueeze(-1)
        return hidden_BLD.masked_scatter(places_BL1, image_tokens.to(hidden_BLD.dtype))


def _check_options(dtype: str, padding_side: str, max_text_tokens: int) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r}: choose left or right")
    if max_text_tokens < 1:
        raise ValueError(f"max_text_tokens={max_text_tokens}: must be at least 1")


def _attention(config: Any) -> str:
    """SDPA, but for models that cap attention scores (Gemma 2), which SDPA cannot."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """A model config without what does not decide a feature: where it came from, and library versions."""
    ignored = {"_name_or_path", "transformers_version", "architectures", "dtype"}
    kept = {k: _comparable(v) if isinstance(v, dict) else v for k, v in config.items() if k not in ignored}
    return json.loads(json.dumps(kept, default=str))


def _describe(processor: Any) -> dict[str, str]:
    vocabulary = json.dumps(processor.tokenizer.get_vocab(), sort_keys=True)
    return {
        "images": json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str),
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "chat_template": str(processor.chat_template),
    }
