"""A diffusion head: predicts the noise in a noisy chunk (DDPM), acts with a few DDIM steps.

Shape suffixes: B samples, R noise draws (or denoising steps) per sample, T chunk, A action dims.

Diffusion Policy (Chi et al. 2023, arXiv 2303.04137) with the transformer of :mod:`models.heads.flow_matching`; the
schedules are those of ``diffusers`` (squared-cosine betas, epsilon prediction, clipped samples). For RL the DDIM steps
are stochastic (``eta``), and the policy's likelihood is that of the denoising chain (DPPO, Ren et al. 2024,
arXiv 2409.00588): see :mod:`models.heads.flow`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from models.heads.flow import _ChainHead, check_at_least_one, critic, masked_mse
from models.heads.flow_matching import ChunkTransformer, TransformerMemory
from nexus_lightning.backbone import FeatureSpec, VLAFeature
from nexus_lightning.schema import TenantSchema


class DiffusionHead(_ChainHead):
    """Epsilon-prediction DDPM training, DDIM acting, with a critic for RL on the denoising chain.

    Acting with ``noise=None`` is DDIM with eta 0 from zeros. Sampled steps have the mean of DDIM with ``eta`` and the
    standard deviation ``max(DDIM's, min_std)``: DDIM's own falls to 0 at the last step, where the density would not
    exist, and exploration would end (DPPO has the same floor).

    Args:
        feature_spec: of the backbone, kind ``tokens``.
        schema: of the tenant; normalised actions must lie in [-1, 1] (samples are clipped to it).
        size: of the transformer: ``XS``, ``S``, ``B`` or ``L``.
        train_steps: steps of the noise schedule.
        num_steps: DDIM steps of :meth:`act`.
        noise_samples: (noise, time) draws per sample and loss: the context is read once for all of them.
        pool_grid: spatial segments are averaged down to at most ``pool_grid x pool_grid`` tokens.
        sde_steps: RL: ``all`` steps stochastic, or ``one`` per sample.
        eta: RL: 0 keeps DDIM's mean, 1 is DDPM's.
        min_std: RL: floor of the standard deviation of a sampled step, in normalised action units.

    Raises:
        ImportError: ``diffusers`` is not installed.
        ValueError: an option is out of range, or the tenant normalises actions to ``mean_std``.
    """

    reads = ("tokens",)

    def __init__(
        self,
        feature_spec: FeatureSpec,
        schema: TenantSchema,
        size: Literal["XS", "S", "B", "L"] = "XS",
        train_steps: int = 100,
        num_steps: int = 10,
        noise_samples: int = 4,
        pool_grid: int = 8,
        sde_steps: Literal["all", "one"] = "all",
        eta: float = 1.0,
        min_std: float = 0.1,
    ) -> None:
        super().__init__(feature_spec, schema, num_steps, noise_samples, sde_steps)
        check_at_least_one(train_steps=train_steps)
        if num_steps > train_steps:
            raise ValueError(f"num_steps={num_steps}: must not exceed train_steps={train_steps}")
        if not 0 <= eta <= 1:
            raise ValueError(f"eta={eta}: must be within 0 and 1")
        if min_std <= 0:
            raise ValueError(f"min_std={min_std}: must be positive, or the last step has no density")
        if schema.action_normalization == "mean_std":
            raise ValueError(
                "action_normalization='mean_std': DiffusionHead clips samples to [-1, 1]; choose min_max (or identity)"
            )
        try:
            from diffusers import DDIMScheduler, DDPMScheduler
        except ImportError as error:
            raise ImportError("DiffusionHead needs diffusers: pip install 'nexus-lightning[vla]'") from error
        schedule = {
            "num_train_timesteps": train_steps,
            "beta_schedule": "squaredcos_cap_v2",
            "clip_sample": True,
            "prediction_type": "epsilon",
        }
        self.train_schedule = DDPMScheduler(**schedule)
        self.eta, self.min_std = eta, min_std
        ddim = DDIMScheduler(**schedule)
        ddim.set_timesteps(num_steps)
        # Per step: its time, and the share of signal (alpha bar) before and after it. Rows of a batch may be at
        # different steps, which DDIMScheduler.step does not offer: its tables are used, its formula is in _transition.
        times = ddim.timesteps
        alphas = ddim.alphas_cumprod[times]
        previous = times - train_steps // num_steps
        after = torch.where(previous >= 0, ddim.alphas_cumprod[previous.clamp(min=0)], ddim.final_alpha_cumprod)
        for name, table in (("times", times), ("alphas", alphas), ("alphas_after", after)):
            self.register_buffer(name, table, persistent=False)
        self.network = ChunkTransformer(feature_spec, schema, size, pool_grid)
        self.value_head = critic(feature_spec, schema)

    def loss(self, features: VLAFeature, state: Tensor, actions: Tensor, is_pad: Tensor) -> dict[str, Tensor]:
        """Mean squared error of the predicted noise; see :meth:`ActionHead.loss`.

        Padded steps are hidden from the other steps' attention and carry no loss.
        """
        actions = torch.where(is_pad.unsqueeze(-1), torch.zeros_like(actions), actions)
        shape = (len(actions), self.noise_samples)
        num_times = self.train_schedule.config.num_train_timesteps
        time_BR = torch.randint(num_times, shape, device=actions.device)
        noise_BRTA = torch.randn(*shape, *actions.shape[1:], device=actions.device, dtype=actions.dtype)
        noisy_BRTA = self.train_schedule.add_noise(
            actions.unsqueeze(1).expand_as(noise_BRTA).flatten(0, 1), noise_BRTA.flatten(0, 1), time_BR.flatten()
        ).unflatten(0, shape)
        predicted = self.network(noisy_BRTA, time_BR / num_times, self._context(features, state), ~is_pad)
        return {"loss": masked_mse(predicted, noise_BRTA, is_pad)}

    def _context(self, features: VLAFeature, state: Tensor) -> TransformerMemory:
        return self.network.context(features, state)

    def _transition(self, x_BRTA: Tensor, step_BR: Tensor, memory: TransformerMemory) -> tuple[Tensor, Tensor, Tensor]:
        """DDIM (Song et al. 2021, arXiv 2010.02502, equations 12 and 16), the predicted sample clipped to [-1, 1]."""
        time_BR = self.times[step_BR] / self.train_schedule.config.num_train_timesteps
        epsilon = self.network(x_BRTA, time_BR, memory)
        alpha, after = (table[step_BR][..., None, None] for table in (self.alphas, self.alphas_after))
        predicted = ((x_BRTA - (1 - alpha).sqrt() * epsilon) / alpha.sqrt()).clamp(-1, 1)
        variance = self.eta**2 * (1 - after) / (1 - alpha) * (1 - alpha / after)
        following = after.sqrt() * predicted + (1 - after).sqrt() * epsilon
        mean = after.sqrt() * predicted + (1 - after - variance).clamp(min=0).sqrt() * epsilon
        return following, mean, variance.sqrt().clamp(min=self.min_std)
