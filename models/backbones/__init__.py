"""Frozen feature extractors; each module holds one :class:`nexus_lightning.backbone.Backbone`."""
