"""Simulators of the lab; each module is named by a `_target_` in `conf/tenant`."""
