"""Trainable action heads; each module holds one :class:`nexus_lightning.head.ActionHead`."""
