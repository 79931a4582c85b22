"""Producers feed the training queue: demonstrations (SFT), rollouts (RL); evaluation reads and never trains."""
