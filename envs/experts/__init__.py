"""Scripted experts with privileged state, one module per simulator."""
