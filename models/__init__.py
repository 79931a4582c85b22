"""The lab: backbones and heads that a config names with ``_target_``. Nothing in ``nexus_lightning`` imports this."""
