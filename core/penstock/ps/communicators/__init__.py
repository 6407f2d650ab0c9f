"""Remotes that do not answer step by step: gradients are queued, merged and exchanged by threads of their own."""
